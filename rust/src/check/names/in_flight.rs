// SPDX-License-Identifier: Apache-2.0
//! A state with batches in flight: the batches that were taken and not executed, and the contents
//! of memory meanwhile.
//!
//! What a batch uses is told from its commands and the tables when it was taken, not from what the
//! core remembers of it. A node's name says all that can still make a difference: commands and
//! writes to come, contents of every block, and the worker's tables if these are not the
//! state's. Twin: kvcore/check/names/in_flight.py.

pub(crate) mod flight_name;
pub(crate) mod forgotten;

use crate::oracle::calls::Name;
use crate::oracle::contents::{Content, Ghost, TierBlock};
use crate::oracle::prefixes::{Numbers, Prefixes};
use crate::oracle::schedule::Schedule;
use crate::oracle::schedule::writes::Write;
use crate::pool::block_pool::BlockPool;
use crate::state::batch_records::{UnconfirmedLoad, in_order};
use crate::state::state::State;
use crate::types::clone_in_place::clone_in_place;
use crate::types::commands::{Command, Commands, Tier};
use crate::types::ids::{BlockId, Row};

clone_in_place! {
    /// A taken batch that is not finished.
    #[derive(Debug)]
    pub(crate) struct Pending {
        pub(crate) number: u64,
        /// None are left once it is executed.
        pub(crate) commands: Commands,
        /// The same.
        pub(crate) writes: Vec<Write>,
        /// The numbers of the positions of those that write, as they were when it was taken.
        pub(crate) nodes: Vec<(Row, Numbers)>,
        /// The places that its copies and its forward pass read or write, each once.
        pub(crate) used: Vec<TierBlock>,
        /// The counts of its requests before it.
        pub(crate) before: Vec<(Row, u32)>,
        pub(crate) executed: bool,
        /// The tokens of those that write, as they were when it was taken, if an engine runs ahead.
        pub(crate) tokens: Texts,
        /// The node's texts before it was executed.
        pub(crate) texts: Texts,
        /// What those of its requests feed from whose last batch was executed.
        pub(crate) feeds: Texts,
        /// That of the weights that it runs with.
        pub(crate) epoch: u32,
        /// Those in which the requests began that write, if later than the first.
        pub(crate) epochs: Vec<(Row, u32)>,
    }
}

/// Tokens of requests, by row.
pub(crate) type Texts = Vec<(Row, Numbers)>;

/// Tokens that a batch samples for a request and that the engine has yet to hand in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Output {
    pub(crate) name: Name,
    pub(crate) row: Row,
    pub(crate) batch: u64,
    /// The request's tokens on the device up to the last new one; empty before it is executed.
    pub(crate) text: Numbers,
    /// The tokens that it brings.
    pub(crate) num_new: u32,
    /// The drafts that it rejected.
    pub(crate) num_rejected: u32,
    /// The pass read what a failed load left.
    pub(crate) spoilt: bool,
    /// The request was cut or scheduled anew since, or that load was reported: it must not be
    /// taken.
    pub(crate) stale: bool,
}

impl Output {
    /// Output to come of a batch that was taken.
    pub(crate) fn awaited(name: Name, row: Row, batch: u64) -> Self {
        let (text, stale, spoilt) = (Numbers::new(), false, false);
        Output { name, row, batch, text, num_new: 0, num_rejected: 0, spoilt, stale }
    }
}

/// An executed load that failed, which the engine has yet to report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unreported {
    pub(crate) batch: u64,
    /// The row of the request that loads, which no other has before the batch completes.
    pub(crate) row: Row,
    /// The first token that is missing.
    pub(crate) first: u32,
}

clone_in_place! {
    /// A state, the batches in flight, and what the executed ones left in memory.
    #[derive(Debug)]
    pub(crate) struct Node {
        /// In a box, so that a node is moved without its bytes.
        pub(crate) state: Box<State>,
        /// Oldest first.
        pub(crate) pending: Vec<Pending>,
        pub(crate) memory: Ghost,
        /// What the open batch schedules, and where unfinished loads begin.
        pub(crate) schedule: Schedule,
        /// Operations whose command was executed, rising.
        pub(crate) started: Vec<u32>,
        /// Whether moves have filled the open batch.
        pub(crate) filled: bool,
        pub(crate) unreported: Vec<Unreported>,
        /// What the engine has yet to hand in, oldest first.
        pub(crate) outputs: Vec<Output>,
        /// The tokens of requests on the device, with the last that it sampled, if a batch to come
        /// feeds from them.
        pub(crate) texts: Texts,
    }
}

impl Node {
    /// Return a state with nothing in flight. memory: holds nothing.
    pub(crate) fn new(state: State, memory: Ghost) -> Self {
        Node {
            state: Box::new(state),
            pending: Vec::new(),
            memory,
            schedule: Schedule::default(),
            started: Vec::new(),
            filled: false,
            unreported: Vec::new(),
            outputs: Vec::new(),
            texts: Vec::new(),
        }
    }

    /// Become a copy of another node of its world, with a state and a schedule of its own.
    pub(crate) fn copy_beside(&mut self, node: &Node, state: &State, schedule: &Schedule) {
        let Node { pending, memory, started, filled, unreported, outputs, texts, .. } = node;
        (*self.state).clone_from(state);
        self.schedule.clone_from(schedule);
        self.pending.clone_from(pending);
        self.memory.clone_from(memory);
        self.started.clone_from(started);
        self.filled = *filled;
        self.unreported.clone_from(unreported);
        self.outputs.clone_from(outputs);
        self.texts.clone_from(texts);
    }

    /// Return the schedule as it is known here, to follow calls with.
    pub(crate) fn resumed(&self) -> Schedule {
        let mut schedule = self.schedule.clone();
        schedule.resume(&self.state);
        schedule
    }

    /// Return the batches that are not executed, oldest first.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = &Pending> {
        self.pending.iter().filter(|batch| !batch.executed)
    }

    /// Tell whether a batch is to be executed, or the open one holds something.
    pub(crate) fn has_commands_to_come(&self) -> bool {
        self.waiting().next().is_some() || !self.state.effects.commands.is_empty()
    }
}

/// Return the batch that is about to be taken.
pub(crate) fn taken(opened: &State, schedule: &Schedule, prefixes: &mut Prefixes) -> Pending {
    let before: Vec<(Row, u32)> = schedule.scheduled().collect();
    let mut used: Vec<TierBlock> = copied(&opened.effects.commands).collect();
    for (row, _) in &before {
        let held = opened[*row].tables.iter().flatten().filter(|&&block| !opened.is_null(block));
        used.extend(held.map(|&block| (Tier::Device, block)));
    }
    used.sort_unstable();
    used.dedup();
    let writes = schedule.writes().to_vec();
    let (mut nodes, mut epochs) = (Texts::new(), Vec::new());
    for write in &writes {
        if nodes.iter().all(|each| each.0 != write.row) {
            let (row, epoch) = (write.row, opened.epoch_of(write.row));
            nodes.push((row, prefixes.nodes(&opened[row], epoch)));
            epochs.extend((epoch > 0).then_some((row, epoch)));
        }
    }
    let (number, commands) = (opened.batch.number, opened.effects.commands.clone());
    let (tokens, texts, feeds) = (Vec::new(), Vec::new(), Vec::new());
    let (executed, epoch) = (false, opened.epoch);
    Pending {
        number,
        commands,
        writes,
        nodes,
        used,
        before,
        executed,
        tokens,
        texts,
        feeds,
        epoch,
        epochs,
    }
}

/// Commands without those that say who owns what and what is findable: they change no memory.
pub(crate) fn in_flight(commands: &Commands) -> impl Iterator<Item = Command> {
    use Command::{Evict, EvictAll, Free, Touch};
    let of_owners =
        |command: &Command| matches!(command, Touch { .. } | Free { .. } | Evict { .. } | EvictAll);
    commands.iter().filter(move |command| !of_owners(command))
}

/// Return the places that copying commands read or write.
pub(crate) fn copied(commands: &Commands) -> impl Iterator<Item = TierBlock> {
    let is_copy = |command: &Command| !matches!(command, Command::Zero { .. });
    let copies = commands.iter().filter(is_copy);
    copies.flat_map(|command| [command.reads(), command.writes()].into_iter().flatten())
}

/// CMD-INFLIGHT: no block that a batch in flight reads or writes is free, and quarantine holds only
/// such blocks.
pub(crate) fn unused_wait(node: &Node) -> Result<(), String> {
    let opened: Vec<TierBlock> = copied(&node.state.effects.commands).collect();
    let used = |place: TierBlock| node.pending.iter().any(|batch| batch.used.contains(&place));
    let tiers: [(Tier, Option<&BlockPool>); 2] =
        [(Tier::Device, Some(&node.state.device)), (Tier::Host, node.state.host.as_ref())];
    for (tier, pool) in tiers {
        let Some(pool) = pool else { continue };
        if let Some(block) = pool.queue.iter().find(|&block| used((tier, block))) {
            return Err(format!("{tier:?} block {} is free, and a batch uses it", block.0));
        }
        let waiting = pool.quarantine.as_ref().map(|each| each.blocks()).unwrap_or_default();
        let idle = |block: &&BlockId| !used((tier, **block)) && !opened.contains(&(tier, **block));
        if let Some(block) = waiting.iter().find(idle) {
            return Err(format!("{tier:?} block {} waits, and no batch uses it", block.0));
        }
    }
    Ok(())
}

/// Forget what can not be read any more: what the state does not count on, unless batches to come
/// use it, the open one included, or a load that has not ended has brought it. wanted: holds what
/// the state counts on.
pub(crate) fn keep_live(node: &mut Node, wanted: &Ghost) {
    let size = node.memory.size;
    let mut to_come = vec![false; node.memory.contents.len() / size];
    let places = node.pending.iter().filter(|batch| !batch.executed).flat_map(|each| &each.used);
    for place in places.copied().chain(copied(&node.state.effects.commands)) {
        to_come[node.memory.first_slot(place) / size] = true;
    }
    let awaiting = node.outputs.iter().map(|output| output.row);
    for row in node.schedule.scheduled().map(|each| each.0).chain(awaiting) {
        let Some(request) = &node.state.requests[row.index()] else { continue };
        for &block in request.tables.iter().flatten() {
            to_come[node.memory.first_slot((Tier::Device, block)) / size] = true;
        }
    }
    let unfinished = node.state.operations.values().filter(|each| each.request.is_some());
    let awaited: Vec<BlockId> = unfinished.map(|each| each.block).collect();
    for request in node.state.requests.iter().flatten().filter(|each| each.num_loading > 0) {
        for &block in request.tables.iter().flatten().filter(|block| !awaited.contains(block)) {
            to_come[node.memory.first_slot((Tier::Device, block)) / size] = true;
        }
    }
    for (slot, content) in node.memory.contents.iter_mut().enumerate() {
        if !to_come[slot / size] && wanted.contents[slot] == Content::Unknown {
            *content = Content::Unknown;
        }
    }
}

/// Return the requests that can report a failed load: the one that loads first.
pub(crate) fn reporters(state: &State, failure: Unreported) -> Vec<Name> {
    let has_left = state.requests[failure.row.index()].is_none();
    let is_of = |load: &&UnconfirmedLoad| {
        let is_loader = load.reporters.first().is_some_and(|each| each.row == failure.row);
        (is_loader || has_left)
            && load.batch == failure.batch
            && (load.first..load.end).contains(&failure.first)
    };
    let reporters = state.loads.iter().filter(is_of).flat_map(|load| &load.reporters);
    let able = reporters.filter(|each| each.most > failure.first);
    able.map(|each| Name::of(&state[each.row])).collect()
}

/// Forget the failures that no request can report any more: of those, nothing may be left.
pub(crate) fn keep_reportable(node: &mut Node) {
    let Node { state, unreported, .. } = node;
    unreported.retain(|&failure| !reporters(state, failure).is_empty());
}

/// Tell whether moves put something into the open batch.
pub(crate) fn fills(start: &State, opened: &State) -> bool {
    let batch = &opened.batch;
    opened.effects.commands.len() > start.effects.commands.len()
        || batch.scheduled.keys().next().is_some()
        || !batch.merges.is_empty()
        || !in_order(&batch.entries).is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::tests::checked_states::{A, config, scheduled};
    use crate::oracle::calls::Call;
    use crate::types::violation::Checks;

    #[test]
    fn a_block_that_a_batch_uses_is_neither_free_nor_waits_for_nobody() {
        let config = crate::types::config::Config { max_in_flight: 1, ..config() };
        let mut run = scheduled(config);
        run.call(&Call::TakeBatch);
        let memory = Ghost::checking(&run.state.config, &Checks::default());
        let used: Vec<TierBlock> =
            run.state[Row(0)].tables[0].iter().map(|&block| (Tier::Device, block)).collect();
        run.call(&Call::Free { name: A });
        let mut node = Node::new(run.state, memory);
        let number = node.state.in_flight[0].number;
        let commands = Commands::default();
        node.pending.push(Pending {
            number,
            commands,
            writes: Vec::new(),
            nodes: Vec::new(),
            used,
            before: Vec::new(),
            executed: false,
            tokens: Vec::new(),
            texts: Vec::new(),
            feeds: Vec::new(),
            epoch: 0,
            epochs: Vec::new(),
        });
        assert_eq!(unused_wait(&node), Ok(()));
        let mut freed = node.clone();
        freed.state.device.end_use(|user| user == number);
        freed.state.device.end_quarantine();
        let said = unused_wait(&freed).unwrap_err();
        assert!(said.ends_with("is free, and a batch uses it"), "{said}");
        node.pending.clear();
        let said = unused_wait(&node).unwrap_err();
        assert!(said.ends_with("waits, and no batch uses it"), "{said}");
    }
}
