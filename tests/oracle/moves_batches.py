# SPDX-License-Identifier: Apache-2.0
"""Moves on batches and transfers: taken, executed late, completed, cancelled; loads that fail."""

from __future__ import annotations

from kvcore import Allocate, Load, Refused, Store, SwapOut, Zero
from kvcore.types.errors import InOpenBatch, LoadUnconfirmed
from tests.oracle.device import Span, Step
from tests.oracle.engine import Engine, Operation
from tests.oracle.finding import demand
from tests.oracle.moves_requests import look_up


def take(e: Engine) -> None:
    """Close the open batch and note what it must do."""
    if e.config.max_in_flight and len(e.unfinished) == e.config.max_in_flight:
        return
    if not e.config.max_in_flight:
        report(e, None)
    if e.config.record_new_blocks:
        e.zeroed += e.call("take_new_block_ids")
    names = list(e.known)
    tables = {e.known[name].row: e.manager.ask("get_block_ids", name) for name in names}
    batch = e.call("take_batch")
    step = Step(batch=batch, spans=e.spans, tables=tables, reported=e.reported, zeroed=e.zeroed)
    e.unexecuted.append(step)
    check_reuse(e, step)
    e.bases[batch.number] = {
        each.name: each.base for each in e.known.values() if each.base is not None
    }
    e.spans, e.zeroed = [], []
    for each in e.known.values():
        if each.base is not None:
            each.base, each.sampler = None, batch.number
        for drafts in each.guesses:
            drafts.batch = batch.number if drafts.batch is None else drafts.batch
        if each.transfer and each.transfer[2] < 0:
            each.transfer = (*each.transfer[:2], batch.number)
    for load in e.failing.values():
        load.batch = batch.number if load.batch is None else load.batch
    for command in batch:
        if isinstance(command, Store | Load):
            operation = e.operations[command.operation]
            wrong = f"{command} is not what was asked for"
            demand(isinstance(command, Load) == operation.loads, wrong)
            operation.key, operation.block = command.key, command.block
            operation.batch = batch.number
    if not e.config.max_in_flight:
        e.owners.follow(batch)
    else:
        e.unfinished.append(batch.number)
    demand(e.manager.ask("in_flight") == tuple(e.unfinished), "in_flight names other batches")


def check_reuse(e: Engine, step: Step) -> None:
    """Demand that a batch is handed no block that an unfinished one reads or writes.

    A `Zero` of a block that nothing else uses can be late without harm, since batches run in order.
    """
    used = {place for number in e.unfinished for place in e.uses[number]}
    rows = {span.row for span in step.spans}
    tables = [ids for row in rows for ids in step.tables[row]]
    uses = {("device", block) for ids in tables for block in ids if block not in null_blocks(e)}
    for command in step.batch:
        if isinstance(command, Allocate):
            free = ("device", command.block) not in used
            demand(free, f"{command} in flight: a batch in flight uses the block")
        if isinstance(command, SwapOut):
            free = ("host", command.host_block) not in used
            demand(free, f"{command} in flight: a batch in flight uses the host block")
        places = (command.reads(), command.writes()) if not isinstance(command, Zero) else ()
        uses |= {place for place in places if place is not None}
    e.uses[step.batch.number] = uses


def finish_all(e: Engine) -> None:
    """Take the open batch, run and complete all batches, and end all operations."""
    for _ in range(2):
        while e.unexecuted or e.unfinished:
            execute(e)
            complete(e)
        take(e)
    while e.unexecuted or e.unfinished:
        execute(e)
        complete(e)
    while e.operations:
        finish_operation(e)


def execute(e: Engine) -> None:
    """Run the oldest batch that the device was given."""
    if e.unexecuted:
        e.device.execute(e.unexecuted.pop(0), e.rng)


def is_executed(e: Engine, batch: int) -> bool:
    """Tell whether the device has run a batch."""
    return batch >= 0 and all(step.batch.number > batch for step in e.unexecuted)


def complete(e: Engine) -> None:
    """Complete the oldest batch, which has run."""
    if e.unfinished and is_executed(e, e.unfinished[0]):
        report(e, e.unfinished[0])
        e.call("complete", e.unfinished.pop(0))


def cancel(e: Engine) -> None:
    """Cancel a batch and all later ones, executed, in part or not at all."""
    if not e.unfinished:
        return
    number = e.rng.choice(e.unfinished)
    if e.unexecuted and e.unexecuted[0].batch.number >= number and e.rng.random() < 0.5:
        half = e.unexecuted[0]
        e.device.apply(half.batch, e.rng, e.rng.randint(0, len(half.batch)))
    e.unexecuted = [step for step in e.unexecuted if step.batch.number < number]
    e.call("cancel", number)
    e.unfinished = [each for each in e.unfinished if each < number]
    bounds = {each.name: each.base for each in e.known.values() if each.base is not None}
    for batch, bases in e.bases.items():
        for name, base in bases.items() if batch >= number else ():
            bounds[name] = min(base, bounds.get(name, base))
    for each in e.known.values():
        count = e.manager.ask("num_computed_tokens", each.name)
        bound = min(each.count, bounds.get(each.name, each.count))
        demand(count <= bound, f"{each.name} counts {count} tokens, {bound} before the batch")
        fell = count < each.count
        each.count = count
        if e.manager.ask("num_draft_tokens", each.name) == 0:
            each.drafts = []
        each.guesses = [g for g in each.guesses if g.batch is not None and g.batch < number]
        each.guesses = each.guesses if count > len(each.stuff) else []
        each.future = each.future[: max(0, count - len(each.stuff) - each.num_rejected)]
        each.sampler = None
        each.swapped = each.swapped and count > 0
        if each.transfer and (each.transfer[2] < 0 or each.transfer[2] >= number):
            each.transfer = None
        if fell:
            each.loading.clear()
        each.base = None
    e.spans = []
    e.failing = {k: v for k, v in e.failing.items() if v.batch is not None and v.batch < number}
    for failed in e.failing.values():
        failed.holding.clear()
    for operation in e.operations.values():
        if operation.batch is None or operation.batch >= number:
            operation.cancelled = True


def report(e: Engine, batch: int | None) -> None:
    """Report failed loads: those of a batch, or of all taken ones."""
    for number, load in list(e.failing.items()):
        if load.batch is None or (batch is not None and load.batch != batch):
            continue
        name = e.rng.choice(e.can_report(load))
        while not e.take_back(e.known[name], load.kept, load):
            others = [each for each in e.known.values() if each.count and each.name != name]
            demand(bool(others), f"the failed load of {load.name} cannot be reported")
            e.free(others[-1])
        del e.failing[number]
        e.reported |= {number}


def finish_transfer(e: Engine) -> None:
    """Finish a transfer of external tokens in the background, of which some may be missing."""
    waiting = [r for r in e.known.values() if r.transfer and is_executed(e, r.transfer[2])]
    if not waiting:
        return
    request = e.rng.choice(waiting)
    assert request.transfer is not None
    first, end, _ = request.transfer
    kept = end if e.rng.random() < 0.6 else e.rng.randint(first, end)
    tables = e.manager.ask("get_block_ids", request.name)
    chain = request.chain(e.contents)
    row, name = request.row, request.name
    e.device.fill(Span(name=name, row=row, first=first, end=kept, chain=chain, loaded=True), tables)
    request.transfer = None
    if kept < end:
        e.take_back(request, kept)
    if request.count and e.rng.random() < 0.8:
        e.call("cache_blocks", name, request.count)


def store(e: Engine) -> None:
    """Copy blocks with a key to the external store."""
    keyed = [block for block in held_blocks(e) if e.manager.ask("has_key", block)]
    if keyed:
        blocks = e.rng.sample(keyed, e.rng.randint(1, min(3, len(keyed))))
        numbers = e.call("store", blocks, allowed=(InOpenBatch, LoadUnconfirmed))
        if not isinstance(numbers, InOpenBatch | LoadUnconfirmed):
            for number, block in zip(numbers, blocks, strict=True):
                e.operations[number] = Operation(block, loads=False)


def load(e: Engine) -> None:
    """Load whole blocks of a request from the external store."""
    step = e.config.block_alignment
    requests = [r for r in e.idle() if r.count % step == 0 and not r.num_encoder_tokens]
    if not requests or not e.config.enable_caching:
        return
    request = e.rng.choice(requests)
    hit = look_up(e, request) if request.count == 0 else None
    first = request.count + (0 if hit is None else hit.num_tokens)
    hashed = len(request.stuff) if request.own is None else request.own * e.hash_size
    most = min(len(request.stuff) - 1, hashed, e.limit) - first
    if most < step:
        return
    count = e.rng.randint(1, most // step) * step
    before = e.before()
    numbers = e.call("load", request.name, count, hit)
    if isinstance(numbers, Refused):
        e.refused(numbers, before, request.name)
        return
    request.base = request.count if request.base is None else request.base
    request.count = request.kept = first + count
    tables = e.manager.ask("get_block_ids", request.name)
    places = [
        (block, position * group.block_size)
        for group, table in zip(e.config.groups, tables, strict=True)
        for position, block in enumerate(table)
        if first <= position * group.block_size < first + count and block not in null_blocks(e)
    ]
    demand(len(places) == len(numbers), f"load of {len(places)} blocks gives {numbers}")
    for number, (block, position) in zip(numbers, places, strict=True):
        e.operations[number] = Operation(block, loads=True)
        request.loading[number] = position
    request.load_end = request.count


def finish_operation(e: Engine) -> None:
    """End a store or load, done or failed."""
    able = [
        number
        for number, each in e.operations.items()
        if each.cancelled or (each.batch is not None and is_executed(e, each.batch))
    ]
    if not able:
        return
    number = e.rng.choice(able)
    operation = e.operations.pop(number)
    done = not operation.cancelled and e.rng.random() < 0.7
    if operation.loads:
        done = done and operation.key in e.device.pages
        e.device.load(operation.key, operation.block, done)
    elif done:
        e.device.store(operation.key, operation.block)
    loader = next((each for each in e.known.values() if number in each.loading), None)
    tables = e.manager.ask("get_block_ids", loader.name) if loader is not None else ()
    e.call("complete_operation", number, done)
    if loader is not None:
        position = loader.loading.pop(number)
        loader.load_end = loader.load_end if done else min(loader.load_end, position)
        if not loader.loading:
            loader.count = 0 if e.is_gone(loader.load_end, tables) else loader.load_end
            loader.drafts = []


def held_blocks(e: Engine) -> list[int]:
    """Return the blocks in the tables of requests."""
    tables = [e.manager.ask("get_block_ids", name) for name in e.known]
    held = dict.fromkeys(block for table in tables for ids in table for block in ids)
    return [block for block in held if block not in null_blocks(e)]


def null_blocks(e: Engine) -> tuple[int, ...]:
    """Return the ids of null blocks."""
    return (0,) if e.config.null_block else ()
