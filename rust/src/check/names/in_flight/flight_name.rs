// SPDX-License-Identifier: Apache-2.0
//! The part of the name of a node with batches in flight that its state's name lacks.
//!
//! Rows, blocks and prefixes have the names that one order of the requests gives them. Twin:
//! kvcore/check/names/in_flight.py.

use smallvec::SmallVec;

use crate::check::names::canonical::renaming::{LOST, Renaming};
use crate::check::names::in_flight::{Node, Pending, in_flight};
use crate::oracle::contents::mirror::{FORGOTTEN, FORGOTTEN_REST, set_entry};
use crate::oracle::contents::{Content, TierBlock};
use crate::oracle::prefixes::Numbers;
use crate::oracle::schedule::writes::Write;
use crate::state::batch_records::in_order;
use crate::state::state::{NO_HOST_BLOCK, State};
use crate::types::commands::{Command, Commands, Tier};
use crate::types::ids::{BlockId, Row, Table};

/// The names of contents that are not prefixes.
const SPECIAL: [(Content, usize); 4] =
    [(Content::Unknown, 0), (Content::Rubbish, 1), (Content::Zeros, 2), (Content::Spoilt, 3)];

/// Write the rest of a node's name. stages: the tables that commands lead to, which are named
/// instead of the commands that change tables.
pub(crate) fn write(node: &Node, stages: Option<&[Vec<Table>]>, names: &mut Renaming<'_>) {
    let folds = stages.is_some();
    names.put_all([node.pending.len(), node.waiting().count(), usize::from(node.filled)]);
    for batch in node.waiting() {
        names.put(batch.writes.len());
        write_commands(&batch.commands, names, folds);
        if node.state.epoch > 0 {
            names.put(batch.epoch as usize);
        }
        batch.writes.iter().for_each(|each| write_write(each, &batch.nodes, names));
    }
    for batch in &node.pending {
        write_used(batch, names);
        names.put(batch.before.len());
    }
    write_open_batch(node, names, folds);
    write_contents(node, names);
    match stages {
        Some(stages) => write_stages(node, stages, names),
        None if node.has_commands_to_come() => {
            let tables = tables_named(node, &node.memory.tables, 0, names);
            tables.into_iter().for_each(|number| names.put(number));
        }
        None => {}
    }
    for &row in names.order() {
        let row = Row(row as u32);
        for known in [node.schedule.loading(row), node.schedule.failed(row)] {
            names.put(known.map_or(0, |token| 1 + token as usize));
        }
    }
    for number in node.state.operations.keys() {
        names.put(usize::from(node.started.contains(number)));
    }
    for failure in &node.unreported {
        let batch = node.pending.iter().position(|batch| batch.number == failure.batch);
        names.put(batch.unwrap_or_default());
        let is_known = node.state.requests[failure.row.index()].is_some();
        names.place(is_known.then_some(failure.row));
        names.put(failure.first as usize);
    }
    write_outputs(node, names);
}

/// Write the outputs that the engine has yet to hand in, and those that feed the device.
fn write_outputs(node: &Node, names: &mut Renaming<'_>) {
    for output in &node.outputs {
        let batch = node.pending.iter().position(|batch| batch.number == output.batch);
        let marks = usize::from(output.stale) + 2 * usize::from(output.spoilt);
        names.put_all([batch.map_or(0, |batch| 1 + batch), marks]);
        let requests = &node.state.requests;
        names.place(Some(output.row).filter(|&row| requests[row.index()].is_some()));
        names.put_counts([output.num_new, output.num_rejected]);
        write_text(&output.text, names);
    }
    let before = node.pending.iter().map(|batch| &batch.texts);
    for texts in std::iter::once(&node.texts).chain(before).filter(|each| !each.is_empty()) {
        for &row in names.order() {
            let text = texts.iter().find(|each| each.0.index() == row);
            write_text(text.map_or(&[][..], |each| &each.1), names);
        }
    }
    for batch in node.pending.iter().filter(|batch| !batch.feeds.is_empty()) {
        for write in &batch.writes {
            let text = batch.feeds.iter().find(|each| each.0 == write.row);
            write_text(text.map_or(&[][..], |each| &each.1), names);
        }
    }
}

/// Write the prefix that some tokens make.
fn write_text(text: &[u32], names: &mut Renaming<'_>) {
    names.put(text.len());
    let node = names.prefixes.number(text).last().copied();
    names.node(node.unwrap_or(0));
}

/// Write the places that a batch uses, by their names.
fn write_used(batch: &Pending, names: &mut Renaming<'_>) {
    let mut used: SmallVec<[usize; 16]> =
        batch.used.iter().map(|&place| name_of(place, names)).collect();
    used.sort_unstable();
    names.put(used.len());
    used.into_iter().for_each(|place| names.put(place));
}

fn name_of((tier, block): TierBlock, names: &mut Renaming<'_>) -> usize {
    match tier {
        Tier::Device => 2 * names.device_name(block),
        Tier::Host => 2 * names.host_name(block) + 1,
    }
}

/// Write the content of the open batch. folds: only which requests' tables it changes.
fn write_open_batch(node: &Node, names: &mut Renaming<'_>, folds: bool) {
    let (state, batch) = (&node.state, &node.state.batch);
    let counts = [node.schedule.writes().len(), batch.scheduled.keys().count(), batch.merges.len()];
    names.put_all(counts);
    write_commands(&state.effects.commands, names, folds);
    for &row in names.order().iter().filter(|_| folds) {
        let changes = |command: Command| table_changed(&command) == Some(Row(row as u32));
        names.put(usize::from(state.effects.commands.iter().any(changes)));
    }
    for each in node.schedule.writes() {
        let nodes = names.prefixes.nodes(&state[each.row], state.epoch_of(each.row));
        write_write(each, &[(each.row, nodes)], names);
    }
    if batch.scheduled.keys().next().is_some() {
        for &row in names.order() {
            let record = batch.scheduled.get(Row(row as u32));
            names.put(record.map_or(0, |record| 1 + record.num_computed_before as usize));
            names.put(record.map_or(0, |record| record.num_kept as usize));
            if batch.delayed.contains(&Row(row as u32)) {
                names.put(1);
            }
            let Some(record) = record else { continue };
            names.put(batch.unwritten_of(record).count());
            for item in batch.unwritten_of(record) {
                names.put_counts([item.group_id, item.position]);
                names.device(item.block);
            }
        }
    }
    for &row in &batch.ends {
        names.put(1 + usize::from(batch.marked.contains(&row)));
        names.place(Some(row));
    }
    for merge in &batch.merges {
        names.place(state.rows.get(&merge.request_id).copied());
        names.put_counts([merge.group_id, merge.position]);
        names.device(merge.block);
    }
    for (row, entry) in in_order(&batch.entries) {
        names.place(Some(row));
        names.put_counts([entry.before, entry.restore, u32::from(entry.publishes)]);
    }
}

/// Write the commands that change memory, or tables of requests. folds: memory alone.
fn write_commands(commands: &Commands, names: &mut Renaming<'_>, folds: bool) {
    let counts = |command: &Command, names: &Renaming<'_>| match *command {
        _ if folds && table_changed(command).is_some() => false,
        Command::CutTable { row, length: 0, .. } => names.has_request(row),
        _ => true,
    };
    names.put(in_flight(commands).filter(|command| counts(command, names)).count());
    for command in in_flight(commands) {
        if counts(&command, names) {
            write_command(&command, names);
        }
    }
}

/// Return the row whose table a command changes.
fn table_changed(command: &Command) -> Option<Row> {
    match *command {
        Command::SetTable { row, .. } | Command::CutTable { row, .. } => Some(row),
        _ => None,
    }
}

fn write_command(command: &Command, names: &mut Renaming<'_>) {
    names.put(command.kind() as usize);
    match *command {
        Command::Allocate { block } | Command::Zero { block } => names.device(block),
        Command::Store { block, key, .. } => {
            names.device(block);
            names.key(&key);
        }
        Command::CopyOnWrite { source, target } => {
            names.device(source);
            names.device(target);
        }
        Command::SwapOut { block, host_block } | Command::SwapIn { host_block, block } => {
            names.device(block);
            names.host(host_block);
        }
        Command::Load { key, block, .. } => {
            names.key(&key);
            names.device(block);
        }
        Command::SetTable { row, group_id, position, block } => {
            names.row(row);
            names.put_counts([group_id, position]);
            names.device(block);
        }
        Command::CutTable { row, group_id, length } => {
            names.row(row);
            names.put_counts([group_id, length]);
        }
        _ => {}
    }
}

/// Write a write, and the prefix that it ends if that is known. nodes: those of the requests that
/// write.
fn write_write(write: &Write, nodes: &[(Row, Numbers)], names: &mut Renaming<'_>) {
    names.row(write.row);
    names.put_counts([write.start, write.loaded, write.end, write.num_slots]);
    let numbers = nodes.iter().find(|each| each.0 == write.row).map(|each| &each.1);
    let known = numbers.map_or(&[][..], |numbers| numbers);
    let last = known[..known.len().min(write.end as usize)].last();
    names.node(last.copied().unwrap_or(0));
}

/// Write the contents of every block, in the order of the names.
fn write_contents(node: &Node, names: &mut Renaming<'_>) {
    for at in 0..names.device.met.len() {
        write_block(node, (Tier::Device, names.device.met[at]), names);
    }
    for at in 0..names.host.met.len() {
        if names.host.met[at] != NO_HOST_BLOCK {
            write_block(node, (Tier::Host, names.host.met[at]), names);
        }
    }
}

fn write_block(node: &Node, place: TierBlock, names: &mut Renaming<'_>) {
    let first = node.memory.first_slot(place);
    let slots = &node.memory.contents[first..first + node.memory.size];
    let known = slots.iter().any(|&content| content != Content::Unknown);
    names.put(usize::from(known));
    if known {
        slots.iter().for_each(|&content| write_content(content, names));
    }
}

fn write_content(content: Content, names: &mut Renaming<'_>) {
    if let Some(&(_, number)) = SPECIAL.iter().find(|each| each.0 == content) {
        names.put(number);
        return;
    }
    match content {
        Content::Prefix(node, group) => {
            names.put_all([4, usize::from(group)]);
            names.node(node);
        }
        Content::Encoded(number, group) => {
            names.put_all([5, usize::from(group), number as usize]);
        }
        _ => {}
    }
}

/// Return the worker's tables now, after the commands of each batch that waits, and after those of
/// the open one.
pub(crate) fn stages(node: &Node) -> Vec<Vec<Table>> {
    let (mut tables, num_groups) = (node.memory.tables.clone(), node.state.config.groups.len());
    let mut stages = vec![tables.clone()];
    let waiting = node.waiting().map(|batch| &batch.commands);
    for commands in waiting.chain([&node.state.effects.commands]) {
        commands.iter().for_each(|command| set_entry(&mut tables, num_groups, &command));
        stages.push(tables.clone());
    }
    stages
}

/// Write the worker's tables at each stage; nothing if all are those of the state.
fn write_stages(node: &Node, stages: &[Vec<Table>], names: &mut Renaming<'_>) {
    let mut named: SmallVec<[SmallVec<[usize; 16]>; 4]> = SmallVec::new();
    for (at, tables) in stages.iter().enumerate() {
        named.push(tables_named(node, tables, at.saturating_sub(1), names));
    }
    let same = named.len() == 2 && named[0] == named[1];
    if !same || named[0] != tables_named(node, &own_tables(&node.state), 0, names) {
        named.iter().flatten().for_each(|&number| names.put(number));
    }
}

/// Return the tables of a state's requests, by their rows.
fn own_tables(state: &State) -> Vec<Table> {
    let mut tables = Vec::new();
    for request in &state.requests {
        for group_id in 0..state.config.groups.len() {
            let own = request.as_ref().map(|request| request.tables[group_id].clone());
            tables.push(own.unwrap_or_default());
        }
    }
    tables
}

/// Return the names of the worker's tables of requests and of the rows by which the batches that
/// wait write, but for the first ones.
fn tables_named(
    node: &Node,
    tables: &[Table],
    first: usize,
    names: &mut Renaming<'_>,
) -> SmallVec<[usize; 16]> {
    let num_groups = node.state.config.groups.len();
    let mut known: SmallVec<[SmallVec<[usize; 8]>; 8]> = SmallVec::new();
    for (at, table) in tables.iter().enumerate().filter(|each| !each.1.is_empty()) {
        let row = Row((at / num_groups) as u32);
        let mut writes = node.waiting().skip(first).flat_map(|batch| &batch.writes);
        if !names.has_request(row) && !writes.any(|each| each.row == row) {
            continue;
        }
        let mut said = SmallVec::from_iter([names.row_name(row), at % num_groups, table.len()]);
        said.extend(table.iter().map(|&block: &BlockId| match block {
            FORGOTTEN => LOST,
            FORGOTTEN_REST => LOST + 1,
            _ => names.device_name(block),
        }));
        known.push(said);
    }
    known.sort_unstable();
    std::iter::once(known.len()).chain(known.into_iter().flatten()).collect()
}
