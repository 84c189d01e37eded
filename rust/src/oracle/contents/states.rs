// SPDX-License-Identifier: Apache-2.0
//! What blocks of state groups hold: one content in the first slot, the prefix that the state
//! stands for.
//!
//! All writes of a request in a batch are one step. Twin: kvcore/oracle/content_oracle.py,
//! kvcore/check/world/ghost.py.

use crate::oracle::contents::{Checked, Content, Ghost, block_at};
use crate::oracle::schedule::writes::Write;
use crate::state::state::State;
use crate::types::commands::Tier;
use crate::types::ids::{Row, Table};
use crate::types::keys::Key;
use crate::types::violation::Violation;

impl Ghost {
    /// Read the states before the steps, and write those after them; return the rows whose state a
    /// failed load spoilt. Fails with STATE-READ.
    pub(crate) fn step_states(&mut self, writes: &[Write]) -> Result<Vec<Row>, Violation> {
        let mut spoilt = Vec::new();
        if !self.groups.iter().any(|group| group.is_state()) {
            return Ok(spoilt);
        }
        let mut steps: Vec<Write> = Vec::new();
        for write in writes {
            match steps.iter_mut().find(|step| step.row == write.row) {
                Some(step) => {
                    let brings = write.loaded > write.start;
                    let (loaded, failed) = (step.loaded, step.failed);
                    *step = Write { start: step.start, ..*write };
                    if !brings {
                        (step.loaded, step.failed) = (loaded, failed);
                    }
                }
                None => steps.push(*write),
            }
        }
        steps.retain(|step| step.start < step.end);
        for step in &steps {
            if self.reads_spoilt(step)? {
                spoilt.push(step.row);
            }
        }
        for step in &steps {
            let nodes = self.nodes[step.row.index()].clone();
            let node = |count: u32| nodes[count as usize - 1];
            let is_lost = step.num_rejected > 0 || self.reads_rubbish(step)?;
            self.put_states(step, |index, count| match is_lost {
                false => Content::Prefix(node(count), index as u8),
                true => Content::Rubbish,
            })?;
        }
        Ok(spoilt)
    }

    /// Whether a step begins with a state that a failed load spoilt, or that did not come. Fails
    /// with STATE-READ.
    fn reads_spoilt(&self, step: &Write) -> Result<bool, Violation> {
        let brings = step.loaded > step.start;
        if brings {
            return Ok(step.failed.is_some());
        }
        let mut spoilt = false;
        for index in self.state_groups() {
            let slot = self.state_slot(step, index)?;
            let wanted = match step.start.checked_sub(1) {
                Some(last) => {
                    Content::Prefix(self.nodes[step.row.index()][last as usize], index as u8)
                }
                None => Content::Zeros,
            };
            if self.contents[slot] == Content::Spoilt {
                spoilt = true;
                continue;
            }
            // What goes on from rejected drafts is lost, and the engine told so.
            let also = if step.ahead { Content::Rubbish } else { wanted };
            self.find("STATE-READ", slot, wanted, also)?;
        }
        Ok(spoilt)
    }

    /// Whether a step goes on from a state that includes a rejected draft.
    fn reads_rubbish(&self, step: &Write) -> Result<bool, Violation> {
        let mut found = false;
        for index in self.state_groups() {
            found |= self.contents[self.state_slot(step, index)?] == Content::Rubbish;
        }
        Ok(found)
    }

    fn state_groups(&self) -> impl Iterator<Item = usize> + use<'_> {
        (0..self.groups.len()).filter(|&index| self.groups[index].is_state())
    }

    /// Where a step reads a group's state, and leaves the one after it.
    fn state_slot(&self, step: &Write, index: usize) -> Result<usize, Violation> {
        Ok(self.first_slot(self.place(step.row, index, step.num_in_state() - 1)?))
    }

    /// Put a content into the blocks that hold the states after a step.
    /// of: the content of a group after a number of tokens and drafts.
    pub(crate) fn put_states(
        &mut self,
        step: &Write,
        of: impl Fn(usize, u32) -> Content,
    ) -> Checked {
        let known = step.num_in_state();
        for index in 0..self.groups.len() {
            if !self.groups[index].is_state() {
                continue;
            }
            for count in known..=known + step.num_drafts {
                // The states after drafts stand in the blocks behind, whatever these hold else.
                let behind = (count - known) * self.groups[index].block_size;
                let place = self.place(step.row, index, known - 1 + behind)?;
                if !self.is_null(place) {
                    let first = self.first_slot(place);
                    self.contents[first..first + self.size].fill(Content::Unknown);
                    self.contents[first] = of(index, count);
                }
            }
        }
        Ok(())
    }

    /// Tell the state at a request's count, unless a load still brings it, and those to which a
    /// cancel takes it back, and those after scheduled drafts. end: the tokens that it holds.
    pub(crate) fn expected_states(
        &self,
        state: &State,
        row: Row,
        (tier, index, table): (Tier, usize, &Table),
        end: u32,
        see: &mut impl FnMut(&'static str, usize, Content) -> Checked,
    ) -> Checked {
        let mut least = state[row].state_count();
        let mut counts = vec![least];
        let taken = state.in_flight.iter().rev().map(|batch| &batch.entries);
        for known in std::iter::once(&state.batch.entries).chain(taken) {
            least = known.get(row).map_or(least, |known| known.restore.min(least));
            counts.push(least);
        }
        counts.dedup();
        let nodes = &self.nodes[row.index()];
        let known = end.min(nodes.len() as u32);
        for count in counts.into_iter().rev().filter(|count| (1..=known).contains(count)) {
            let block = block_at(table, (count - 1) / self.groups[index].block_size)?;
            let content = Content::Prefix(nodes[count as usize - 1], index as u8);
            see("STATE-READ", self.first_slot((tier, block)), content)?;
        }
        let drafts = state[row].state_count() as usize..known as usize;
        let behind = table.len() - state[row].num_scheduled_drafts() as usize;
        for (&block, &node) in
            table[behind..].iter().zip(&nodes[drafts.start.min(drafts.end)..drafts.end])
        {
            let content = Content::Prefix(node, index as u8);
            see("STATE-READ", self.first_slot((tier, block)), content)?;
        }
        Ok(())
    }

    /// The property that a block holds the content of its key.
    pub(crate) fn of_key(&self, key: &Key) -> &'static str {
        let is_state = self.groups[key.group_id() as usize].is_state();
        if is_state { "STATE-KEY" } else { "CACHE-KV" }
    }
}
