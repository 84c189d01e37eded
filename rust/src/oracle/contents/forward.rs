// SPDX-License-Identifier: Apache-2.0
//! The forward pass of a batch, on what every slot holds.
//!
//! All requests of a batch write, and then all read: what one computes another may hit in the same
//! step. Twin: kvcore/oracle/contents.py.

use crate::oracle::contents::{Checked, Content, Ghost, encoded};
use crate::oracle::prefixes::{Numbers, Prefixes};
use crate::oracle::schedule::Schedule;
use crate::oracle::schedule::writes::Write;
use crate::state::state::State;
use crate::types::groups::{Group, skipped_tokens};
use crate::types::ids::Row;
use crate::types::violation::Violation;

impl Ghost {
    /// Load and write what a batch schedules, then read as its queries do; state: the one that the
    /// batch was taken from.
    pub fn forward(
        &mut self,
        state: &State,
        writes: &[Write],
        schedule: &Schedule,
        prefixes: &mut Prefixes,
    ) -> Checked {
        for write in writes {
            self.set_nodes(write.row, state, prefixes);
        }
        self.forward_numbered(writes, schedule)
    }

    /// The same, if the positions of the requests have their numbers.
    pub(crate) fn forward_numbered(&mut self, writes: &[Write], schedule: &Schedule) -> Checked {
        writes.iter().try_for_each(|write| self.check_zeroed(write.row))?;
        self.marks.iter_mut().for_each(|marks| marks.empty = false);
        let spoilt = self.step_states(writes)?;
        for write in writes {
            self.write(write)?;
        }
        if writes.iter().any(|write| write.failed.is_some()) || !spoilt.is_empty() {
            self.spread(writes, spoilt)?;
        }
        writes.iter().try_for_each(|write| self.read(write, schedule))
    }

    /// Let the positions of a row's request have these numbers.
    pub(crate) fn set_numbers(&mut self, row: Row, numbers: Numbers) {
        *self.numbers_of(row) = numbers;
    }

    pub(crate) fn set_nodes(&mut self, row: Row, state: &State, prefixes: &mut Prefixes) {
        prefixes.nodes_into(&state[row], state.epoch_of(row), self.numbers_of(row));
    }

    fn numbers_of(&mut self, row: Row) -> &mut Numbers {
        if self.nodes.len() <= row.index() {
            self.nodes.resize(row.index() + 1, Numbers::new());
        }
        &mut self.nodes[row.index()]
    }

    fn check_zeroed(&self, row: Row) -> Checked {
        if !self.checks.count("ZEROED") {
            return Ok(());
        }
        let zeroed = |each: &(usize, &Group)| each.1.zero_new_blocks;
        for (index, _) in self.groups.iter().enumerate().filter(zeroed) {
            let table = self.table(row.index(), index);
            let empty = table.iter().find(|block| self.marks[block.index()].empty);
            if let Some(block) = empty {
                let detail = format!("block {} of group {index} is read and was neither", block.0);
                return Err(Violation::new("ZEROED", format!("{detail} zeroed nor filled")));
            }
        }
        Ok(())
    }

    fn write(&mut self, write: &Write) -> Checked {
        for index in 0..self.groups.len() {
            let group = self.groups[index];
            if group.is_state() {
                continue;
            }
            if group.is_cross() {
                for (position, content) in (0..).zip(encoded(write.encoder.as_ref(), index)) {
                    self.put(write.row, index, position, content)?;
                }
                continue;
            }
            for position in write.start..write.num_slots {
                let spoilt = write.failed.is_some_and(|first| first <= position);
                let content = if spoilt && position < write.loaded {
                    Content::Spoilt
                } else if position < write.end {
                    Content::Prefix(self.nodes[write.row.index()][position as usize], index as u8)
                } else {
                    Content::Rubbish
                };
                self.put(write.row, index, position, content)?;
            }
        }
        Ok(())
    }

    fn put(&mut self, row: Row, group_id: usize, position: u32, content: Content) -> Checked {
        let place = self.place(row, group_id, position)?;
        if !self.is_null(place) {
            let slot = self.slot(place, group_id, position);
            self.contents[slot] = content;
        }
        Ok(())
    }

    /// Spoil everything that is computed from spoilt slots, in the order of the calls, or from
    /// spoilt states. spoilt: the rows with these.
    fn spread(&mut self, writes: &[Write], mut spoilt: Vec<Row>) -> Checked {
        for write in writes {
            for query in write.loaded..write.end {
                if !spoilt.contains(&write.row) && !self.sees_spoilt(write.row, query)? {
                    continue;
                }
                spoilt.push(write.row);
                for group_id in 0..self.groups.len() {
                    if self.groups[group_id].has_tokens() {
                        self.put(write.row, group_id, query, Content::Spoilt)?;
                    }
                }
            }
            if spoilt.contains(&write.row) {
                self.put_states(write, |_, _| Content::Spoilt)?;
            }
        }
        Ok(())
    }

    fn sees_spoilt(&self, row: Row, query: u32) -> Result<bool, Violation> {
        for (index, group) in self.groups.iter().enumerate().filter(|each| each.1.has_tokens()) {
            for position in skipped_tokens(group, query)..query {
                let place = self.place(row, index, position)?;
                if self.contents[self.slot(place, index, position)] == Content::Spoilt {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Whether a position of a row was computed from a failed load.
    pub(crate) fn holds_spoilt(&self, row: Row, position: u32) -> bool {
        let groups = self.groups.iter().enumerate().filter(|each| each.1.has_tokens());
        let mut places = groups.map(|(index, _)| (index, self.place(row, index, position)));
        places.any(|(index, place)| {
            let slot = place.map(|place| self.slot(place, index, position));
            slot.is_ok_and(|slot| self.contents[slot] == Content::Spoilt)
        })
    }

    /// What the queries of a step see, each group of its own, must be there.
    fn read(&self, write: &Write, schedule: &Schedule) -> Checked {
        if write.loaded == write.end {
            return Ok(());
        }
        for (index, group) in self.groups.iter().enumerate().filter(|each| !each.1.is_state()) {
            let first = if group.is_cross() { 0 } else { skipped_tokens(group, write.loaded) };
            let held = self.held(write.row, index, write.end, schedule);
            for (position, content) in held.skip(first as usize) {
                let place = self.place(write.row, index, position)?;
                let slot = self.slot(place, index, position);
                self.find("KV-READ", slot, content, Content::Spoilt)?;
            }
        }
        Ok(())
    }
}
