# SPDX-License-Identifier: Apache-2.0
"""What a batch to come overwrites before anything reads it: it counts as unknown.

Commands run in order, and the forward pass of a batch after its commands. A block that is handed
out, zeroed or copied to loses what it held; a table loses entries that are set or cut. If neither a
copy nor a pass reads them before, nothing can, unless a cancel drops the commands: then what is
unknown must not be read either, since it equals nothing. So states are folded, and none that breaks
a property is lost. Texts on the device from which no pass can feed any more are forgotten, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from kvcore.check.names.in_flight import COPIES, Node
from kvcore.oracle.content_oracle import FORGOTTEN, FORGOTTEN_REST, Tables
from kvcore.oracle.contents import TierBlock
from kvcore.types.commands import Allocate, Command, CutTable, SetTable, Zero

Texts = Mapping[str, tuple[int, ...]]


def forget_overwritten(node: Node) -> Node:
    """Return a node without what the batches that wait, and the open one, overwrite before
    anything reads it.
    """
    tables: Tables = dict(node.tables)
    overwritten: dict[TierBlock, bool] = {}
    read_rows = set[int]()
    for batch in node.waiting:
        _follow(batch.commands, overwritten, tables, read_rows)
        for place in batch.used:
            overwritten.setdefault(place, False)
        read_rows.update(batch.requests[each.request_id].row for each in batch.writes)
    _follow(node.state.batch.commands, overwritten, tables, read_rows)
    kept = {
        place: slots for place, slots in node.contents.items() if not overwritten.get(place, False)
    }
    return attrs.evolve(forget_texts(node), contents=kept, tables=tables)


def forget_texts(node: Node) -> Node:
    """Return a node without texts on the device from which no pass can feed: that needs an output
    that was sampled and may still be taken, or, once a batch is cancelled, one of an older batch.
    """
    sampled = [each for each in node.outputs if each.text and not each.stale]

    def fed(texts: Texts, before: int) -> Texts:
        names = {each.request_id for each in sampled if each.batch < before}
        return {name: text for name, text in texts.items() if name in names}

    pending = [attrs.evolve(each, texts=fed(each.texts, each.number)) for each in node.pending]
    texts = fed(node.texts, node.state.batch.number)
    return attrs.evolve(node, texts=texts, pending=tuple(pending))


def _follow(
    commands: Iterable[Command],
    overwritten: dict[TierBlock, bool],
    tables: Tables,
    read_rows: set[int],
) -> None:
    """Note what the commands of a batch do first to a block, and forget entries of tables that no
    pass has read.
    """
    for command in commands:
        match command:
            case Allocate(block):
                overwritten.setdefault(("device", block), True)
            case SetTable(row, group_id, position) if row not in read_rows:
                table = tables.get((row, group_id), ())
                if position < len(table) and table[position] != FORGOTTEN_REST:
                    tables[row, group_id] = (
                        *table[:position],
                        FORGOTTEN,
                        *table[position + 1 :],
                    )
            case CutTable(row, group_id, length) if row not in read_rows:
                table = tables.get((row, group_id), ())
                if length < len(table):
                    tables[row, group_id] = (*table[:length], FORGOTTEN_REST)
            case _ if isinstance(command, (*COPIES, Zero)):
                source, target = command.reads(), command.writes()
                if source is not None:
                    overwritten.setdefault(source, False)
                if target is not None:
                    overwritten.setdefault(target, True)
