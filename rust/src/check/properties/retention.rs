// SPDX-License-Identifier: Apache-2.0
//! Properties of the effect of levels on the free queue, which is followed independently, by the
//! commands of a call.
//!
//! No transition calls anything here. Twin: kvcore/check/properties/retention.py.

use std::collections::{BTreeMap, BTreeSet};

use crate::check::properties::hits::{all_hit_blocks, hit_of};
use crate::check::properties::published::Made;
use crate::oracle::calls::Call;
use crate::pool::block_pool::BlockPool;
use crate::pool::quarantine::Quarantine;
use crate::pool::retention_state::{Kept, level_of};
use crate::types::commands::Command;
use crate::types::ids::{BlockId, Row};
use crate::types::retention::{wish_at, wishes_of};
use crate::types::violation::Finding;

type KeptBlocks = BTreeMap<BlockId, Kept>;

/// WISHES: a block has the retention wishes of all requests that released it, joined part by part;
/// a block that was taken, or is free without a key, has none.
pub(crate) fn wishes(made: &Made<'_>) -> Finding {
    let (before, after) = (made.before, made.after);
    if before.device.retention.is_none() {
        return Ok(());
    }
    let mut expected = joined(made);
    for command in made.outcome.commands(after) {
        if let Command::Allocate { block } = command {
            expected.remove(&block);
        }
    }
    let pool = &after.device;
    let is_idle = |block| pool.queue.contains(block) && pool.key(block).is_none();
    expected.retain(|&block, kept| *kept != Kept::default() && !is_idle(block));
    let found: KeptBlocks = pool.all_kept().collect();
    if found == expected {
        return Ok(());
    }
    let name = made.call.transition();
    Err(format!("{name} leaves the wishes {found:?}, not {expected:?}"))
}

/// Return the wish for each block after the requests that lose it have joined theirs.
fn joined(made: &Made<'_>) -> KeptBlocks {
    let (before, mut kept) = (made.before, made.before.device.all_kept().collect::<KeptBlocks>());
    for (row, group_id, position, block) in lost(made) {
        let size = before.config.groups[group_id as usize].block_size;
        let wish = wish_at(wishes_of(&before.wishes, row), (position + 1) * size - 1);
        let ends = if wish.duration > 0 { before.device.now() + wish.duration } else { 0 };
        let each = kept.entry(block).or_default();
        each.base = each.base.max(wish.base);
        each.level = each.level.max(wish.level);
        each.until = each.until.max(ends);
    }
    kept
}

/// Return the blocks that requests lose: row, group, position and block. A block that one call
/// shares and replaces, or gives back, is lost, too: a hit, or what a merge puts into a table. A
/// state that moves to another position is not.
fn lost(made: &Made<'_>) -> Vec<(Row, u32, u32, BlockId)> {
    let (before, after, mut found) = (made.before, made.after, Vec::new());
    let taken: Vec<BlockId> = made
        .outcome
        .commands(after)
        .filter_map(|command| match command {
            Command::Allocate { block } => Some(block),
            _ => None,
        })
        .collect();
    let rows = (0..).map(Row).zip(&before.requests);
    for (row, request) in rows.filter_map(|(row, request)| Some((row, request.as_ref()?))) {
        let left = after.requests[row.index()].as_ref();
        let left = left.filter(|left| left.request_id == request.request_id);
        for (index, table) in request.tables.iter().enumerate() {
            let held = left.map_or(&[][..], |left| &left.tables[index]);
            for (position, &block) in table.iter().enumerate() {
                let moves = held.contains(&block) && !taken.contains(&block);
                let stays = held.get(position) == Some(&block) || moves;
                if !before.is_null(block) && !stays {
                    found.push((row, index as u32, position as u32, block));
                }
            }
        }
    }
    for command in made.outcome.commands(after) {
        let Command::SetTable { row, group_id, position, block } = command else { continue };
        let is_there = before.requests.get(row.index()).is_some_and(Option::is_some);
        let held = after.requests[row.index()].as_ref().map(|left| &left.tables[group_id as usize]);
        let stays = held.is_some_and(|held| held.get(position as usize) == Some(&block));
        if is_there && !before.is_null(block) && !stays {
            found.push((row, group_id, position, block));
        }
    }
    let Some((row, _)) = hit_of(made) else { return found };
    for (group_id, position, block) in all_hit_blocks(made) {
        let held = after[row].tables[group_id as usize].get(position as usize);
        if held.is_some_and(|&held| held != block) {
            found.push((row, group_id, position, block));
        }
    }
    found
}

/// LRU, if blocks leave by level.
pub(crate) fn leaves_by_level(made: &Made<'_>) -> Finding {
    let mut followed = Followed::new(made);
    followed.follow(made)?;
    if let (Call::Tick { now }, false) = (made.call, made.outcome.is_misuse()) {
        followed.tick(*now);
    }
    let queue: Vec<BlockId> = made.after.device.queue.iter().collect();
    if queue == followed.queue {
        return Ok(());
    }
    let (name, expected) = (made.call.transition(), followed.queue);
    Err(format!("{name} leaves the queue {queue:?}; its commands and levels give {expected:?}"))
}

/// The free queue of a pool, followed by the commands of a call.
struct Followed<'a> {
    pool: &'a BlockPool,
    queue: Vec<BlockId>,
    kept: KeptBlocks,
    now: u64,
    cached: BTreeSet<BlockId>,
}

impl<'a> Followed<'a> {
    /// Begin with the queue before the call.
    fn new(made: &Made<'a>) -> Self {
        let pool = &made.before.device;
        let blocks = (0..pool.num_blocks()).map(BlockId);
        Followed {
            pool,
            queue: pool.queue.iter().collect(),
            kept: joined(made),
            now: pool.now(),
            cached: blocks.filter(|&block| pool.key(block).is_some()).collect(),
        }
    }

    /// Move the blocks as the commands say; fails with each taken block that was not the front.
    fn follow(&mut self, made: &Made<'_>) -> Finding {
        let after = &made.after.device;
        let waits = |block| after.quarantine.as_ref().is_some_and(|each| each.contains(block));
        let commands: Vec<Command> = made.outcome.commands(made.after).collect();
        for block in self.pool.quarantine.iter().flat_map(Quarantine::blocks) {
            if !waits(block) && !commands.contains(&Command::Touch { block }) {
                self.join(block);
            }
        }
        for (place, command) in commands.iter().enumerate() {
            match *command {
                Command::Allocate { block }
                    if self.queue.first() == Some(&block)
                        || self.pool.floors.is_some() && self.queue.contains(&block) =>
                {
                    self.queue.retain(|each| *each != block);
                }
                Command::Allocate { block } => {
                    let (name, queue) = (made.call.transition(), &self.queue);
                    return Err(format!(
                        "{name} takes block {}, but the queue is {queue:?}",
                        block.0
                    ));
                }
                Command::Touch { block } => self.queue.retain(|each| *each != block),
                Command::Evict { block, .. } => {
                    self.cached.remove(&block);
                    let is_taken = commands.get(place + 1) == Some(&Command::Allocate { block });
                    if self.queue.contains(&block) && !is_taken {
                        self.queue.retain(|each| *each != block);
                        self.join(block);
                    }
                }
                Command::EvictAll => self.cached.clear(),
                Command::Free { block, cached } => {
                    if cached {
                        self.cached.insert(block); // perhaps published by this call
                    }
                    if !waits(block) {
                        self.join(block);
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Return the current level of a block; a block without a key is below all levels.
    fn level(&self, block: BlockId) -> Option<u8> {
        let kept = self.kept.get(&block).copied().unwrap_or_default();
        self.cached.contains(&block).then(|| level_of(kept, self.now))
    }

    /// Put a freed block into its place.
    fn join(&mut self, block: BlockId) {
        let level = self.level(block);
        let behind = self.queue.iter().position(|&each| self.level(each) > level);
        let is_first = level.is_none() && !self.pool.is_older(block);
        let place = if is_first { 0 } else { behind.unwrap_or(self.queue.len()) };
        self.queue.insert(place, block);
    }

    /// Let time pass from one end of a level to the next.
    fn tick(&mut self, now: u64) {
        let is_over = |until: &u64| self.now < *until && *until <= now;
        let ends: BTreeSet<u64> =
            self.kept.values().map(|kept| kept.until).filter(is_over).collect();
        for moment in ends {
            let ends_now =
                |block: &&BlockId| self.kept.get(block).is_some_and(|k| k.until == moment);
            let ending: Vec<(BlockId, Option<u8>)> =
                self.queue.iter().filter(ends_now).map(|&each| (each, self.level(each))).collect();
            self.now = moment;
            for (block, level) in ending {
                if self.level(block) < level {
                    self.queue.retain(|each| *each != block);
                    self.join(block);
                }
            }
        }
        self.now = now;
    }
}
