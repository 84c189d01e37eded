// SPDX-License-Identifier: Apache-2.0
//! What one call may take from tenants, with what each holds followed by its commands.
//!
//! A part of transitions.rs. Twin: kvcore/check/properties/floors.py.

use std::collections::BTreeSet;

use crate::check::properties::published::Made;
use crate::oracle::calls::Call;
use crate::state::state::State;
use crate::types::commands::Command;
use crate::types::ids::{BlockId, Row};
use crate::types::violation::Finding;

/// FLOOR: a call takes from another tenant only blocks above that tenant's floor, passes over no
/// block that it may take, and notes for which tenant each block was taken.
pub(crate) fn floor(made: &Made<'_>) -> Finding {
    let (before, after) = (made.before, made.after);
    let Some(takers) = after.device.takers() else { return Ok(()) };
    if !after.device.counts_right() {
        return Err(format!("{} leaves wrong counts of tenants", made.call.transition()));
    }
    let (mut tenants, mut evicted) = (Tenants::new(before), None);
    let mut queue: Vec<BlockId> = before.device.queue.iter().collect();
    let is_cancel = matches!(made.call, Call::Cancel { .. });
    let orders = before.device.policy.is_none() && !is_cancel;
    for command in made.outcome.commands(after) {
        let decides = match command {
            Command::Evict { block, .. } if queue.contains(&block) => {
                evicted = Some(block);
                Some(block)
            }
            Command::Allocate { block } if evicted != Some(block) => Some(block),
            _ => None,
        };
        let taker = decides.and_then(|block| taker_of(made, block));
        if let (Some(block), Some(taker)) = (decides, taker) {
            let (name, id) = (made.call.transition(), block.0);
            if !tenants.may_take(block, taker) {
                return Err(format!("{name} takes block {id}, which a floor keeps"));
            }
            let place = queue.iter().position(|&each| each == block).filter(|_| orders);
            let mut passed = queue[..place.unwrap_or(0)].iter();
            if passed.any(|&each| tenants.may_take(each, taker)) {
                return Err(format!("{name} takes block {id} before another that it may take"));
            }
        }
        tenants.follow(command);
        if let Command::Allocate { block } = command {
            // What comes back for several tenants counts for none of them before all is taken.
            tenants.takers[block.index()] = taker_of(made, block).unwrap_or(0);
        }
        if let Command::Allocate { block } | Command::Touch { block } = command {
            queue.retain(|&each| each != block);
        }
    }
    for command in made.outcome.commands(after) {
        if let Command::Allocate { block } = command {
            let mut holders = rows_of(after, block).peekable();
            let noted = takers[block.index()];
            if holders.peek().is_some() && !holders.any(|row| after.tenant(row) == noted) {
                return Err(format!("block {} was not taken for tenant {noted}", block.0));
            }
        }
    }
    Ok(())
}

/// The tenant for which a call takes a block: none of them if requests of several come back by it.
fn taker_of(made: &Made<'_>, block: BlockId) -> Option<u8> {
    let after = made.after;
    let tenants: BTreeSet<u8> = match made.call {
        Call::SwapIn { names } => {
            names.iter().filter_map(|name| name.row(after)).map(|row| after.tenant(row)).collect()
        }
        _ => rows_of(after, block).map(|row| after.tenant(row)).collect(),
    };
    let first = tenants.first().copied();
    if tenants.len() > 1 { Some(0) } else { first }
}

/// The rows of the requests that hold a block.
fn rows_of(state: &State, block: BlockId) -> impl Iterator<Item = Row> + '_ {
    let rows = (0..).map(Row).zip(&state.requests);
    let known = rows.filter_map(|(row, each)| Some((row, each.as_ref()?)));
    let holds = known.filter(move |(_, each)| each.tables.iter().flatten().any(|&id| id == block));
    holds.map(|(row, _)| row)
}

/// What each tenant holds, followed by the commands of a call.
pub(crate) struct Tenants {
    least: Vec<u32>,
    takers: Vec<u8>,
    owned: BTreeSet<BlockId>,
    keyed: BTreeSet<BlockId>,
    free: BTreeSet<BlockId>,
}

impl Tenants {
    /// As they are in a state.
    pub(crate) fn new(state: &State) -> Self {
        let pool = &state.device;
        let blocks = || (0..pool.num_blocks()).map(BlockId);
        Tenants {
            least: state.config.floors.iter().map(|each| each.1).collect(),
            takers: pool.takers().unwrap_or_default().to_vec(),
            owned: blocks().filter(|&block| pool.ref_count(block) > 0).collect(),
            keyed: blocks().filter(|&block| pool.key(block).is_some()).collect(),
            free: pool.queue.iter().collect(),
        }
    }

    /// Note what a command changes.
    pub(crate) fn follow(&mut self, command: Command) {
        match command {
            Command::Allocate { block } | Command::Touch { block } => {
                self.owned.insert(block);
                self.free.remove(&block);
            }
            Command::Free { block, cached } => {
                self.owned.remove(&block);
                if cached {
                    self.keyed.insert(block)
                } else {
                    self.keyed.remove(&block)
                };
            }
            Command::Evict { block, .. } => _ = self.keyed.remove(&block),
            Command::EvictAll => self.keyed.clear(),
            _ => {}
        }
    }

    /// The blocks of a tenant that have an owner or are cached.
    fn num_held(&self, tenant: u8) -> u32 {
        let held = self.owned.union(&self.keyed);
        held.filter(|block| self.takers[block.index()] == tenant).count() as u32
    }

    /// Whether a tenant may take a free block.
    fn may_take(&self, block: BlockId, taker: u8) -> bool {
        let tenant = self.takers[block.index()];
        tenant == 0
            || tenant == taker
            || !self.keyed.contains(&block)
            || self.num_held(tenant) > self.least[usize::from(tenant) - 1]
    }

    /// The free blocks that others keep from a tenant.
    pub(crate) fn num_kept(&self, taker: u8) -> u32 {
        let kept = |(tenant, &least): (u8, &u32)| {
            let cached = self.free.intersection(&self.keyed);
            let cached = cached.filter(|block| self.takers[block.index()] == tenant).count() as u32;
            let rest = self.num_held(tenant) - cached;
            if tenant == taker { 0 } else { cached.min(least.saturating_sub(rest)) }
        };
        (1..).zip(&self.least).map(kept).sum()
    }
}
