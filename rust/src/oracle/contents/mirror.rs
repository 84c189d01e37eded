// SPDX-License-Identifier: Apache-2.0
//! The commands of a batch, on what every slot holds, on tables and on owners.
//!
//! Commands run one after the other. Twin: kvcore/oracle/contents.py.

use crate::oracle::contents::{Checked, Content, Ghost, Marks};
use crate::oracle::prefixes::Prefixes;
use crate::state::state::State;
use crate::types::commands::{Command, Tier};
use crate::types::ids::{BlockId, Table};

/// In the place of a table's entry that counts as unknown; no block has this number.
pub(crate) const FORGOTTEN: BlockId = BlockId(u32::MAX);
/// In the place of all entries from there on, of which not even the number is known.
pub(crate) const FORGOTTEN_REST: BlockId = BlockId(u32::MAX - 1);

impl Ghost {
    /// Run the commands of a batch in order.
    pub fn execute(
        &mut self,
        commands: impl IntoIterator<Item = Command>,
        prefixes: &mut Prefixes,
    ) -> Checked {
        for command in commands {
            self.mirror(&command, prefixes)?;
            self.copy(&command);
            if let Some((Tier::Device, block)) = command.writes() {
                self.marks[block.index()].empty = false;
            }
        }
        Ok(())
    }

    /// Bring what an unfinished load fills, or spoil it; a store changes no content.
    pub fn complete(&mut self, operation: u32, done: bool, prefixes: &mut Prefixes) -> Checked {
        let place = self.loads.iter().position(|load| load.0 == operation);
        let Some(place) = place else { return Ok(()) };
        let (_, key, block, epoch) = self.loads.swap_remove(place);
        let first = self.first_slot((Tier::Device, block));
        let nodes = prefixes.block(&key, epoch)?;
        for (slot, &node) in self.contents[first..].iter_mut().zip(nodes) {
            *slot =
                if done { Content::Prefix(node, key.group_id() as u8) } else { Content::Spoilt };
        }
        Ok(())
    }

    /// Do what a copying command does to contents; other commands do nothing.
    fn copy(&mut self, command: &Command) {
        if let Command::Load { block, .. } = *command {
            self.forget(block);
            return;
        }
        let Some(target) = command.writes() else { return };
        let target = self.first_slot(target);
        match command.reads() {
            Some(source) => {
                let source = self.first_slot(source);
                self.contents.copy_within(source..source + self.size, target);
            }
            None => self.contents[target..target + self.size].fill(Content::Zeros),
        }
    }

    /// Follow owners and tables, and forget what loses its content.
    fn mirror(&mut self, command: &Command, prefixes: &mut Prefixes) -> Checked {
        match *command {
            Command::Allocate { block } => {
                let marks = Marks { owned: true, empty: true, ..Marks::default() };
                self.marks[block.index()] = marks;
                self.forget(block);
            }
            Command::Touch { block } => {
                let marks = &mut self.marks[block.index()];
                (marks.owned, marks.cached, marks.evicted) = (true, false, false);
            }
            Command::Free { block, cached } => {
                let marks = &mut self.marks[block.index()];
                (marks.owned, marks.evicted) = (false, false);
                if cached {
                    marks.cached = true;
                } else {
                    self.forget(block);
                }
            }
            Command::Evict { block, .. } => self.evict(block),
            Command::EvictAll => {
                for block in (0..self.marks.len() as u32).map(BlockId) {
                    self.marks[block.index()].evicted = false;
                    if std::mem::take(&mut self.marks[block.index()].cached) {
                        self.forget(block);
                    }
                }
            }
            Command::Store { block, key, .. } => {
                let first = self.first_slot((Tier::Device, block));
                for (slot, &node) in prefixes.block(&key, self.epoch)?.iter().enumerate() {
                    let content = Content::Prefix(node, key.group_id() as u8);
                    self.find(self.of_key(&key), first + slot, content, content)?;
                }
            }
            Command::Load { operation, key, block } => {
                self.loads.push((operation, key, block, self.epoch));
            }
            _ => set_entry(&mut self.tables, self.groups.len(), command),
        }
        Ok(())
    }

    /// Let a block lose a key; where it can have several, it is perhaps found under another one.
    fn evict(&mut self, block: BlockId) {
        let marks = &mut self.marks[block.index()];
        if self.has_tails {
            marks.evicted = true;
            return;
        }
        marks.cached = false;
        if !marks.owned {
            self.forget(block);
        }
    }

    /// Forget the blocks that lost the last of their keys.
    pub(super) fn settle_evicted(&mut self, state: &State) {
        for block in (0..self.marks.len() as u32).map(BlockId) {
            let marks = &mut self.marks[block.index()];
            if std::mem::take(&mut marks.evicted) && !marks.owned && !state.device.has_key(block) {
                marks.cached = false;
                self.forget(block);
            }
        }
    }

    fn forget(&mut self, block: BlockId) {
        let first = self.first_slot((Tier::Device, block));
        self.contents[first..first + self.size].fill(Content::Unknown);
    }
}

/// Apply a command to block tables; one that changes none does nothing.
pub(crate) fn set_entry(tables: &mut Vec<Table>, num_groups: usize, command: &Command) {
    let (Command::SetTable { row, group_id, .. } | Command::CutTable { row, group_id, .. }) =
        *command
    else {
        return;
    };
    let at = row.index() * num_groups + group_id as usize;
    if tables.len() <= at {
        tables.resize_with(at + 1, Table::new);
    }
    let table = &mut tables[at];
    match *command {
        Command::SetTable { position, block, .. } => match table.get_mut(position as usize) {
            Some(entry) if *entry == FORGOTTEN_REST => {}
            Some(entry) => *entry = block,
            None => table.push(block),
        },
        Command::CutTable { length, .. } => table.truncate(length as usize),
        _ => {}
    }
}
