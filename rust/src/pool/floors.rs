// SPDX-License-Identifier: Apache-2.0
//! Floors: how much of each tenant's content the others must leave cached.
//!
//! Invariants: a block belongs to the tenant whose request took it last. A tenant holds the blocks
//! of its own that have an owner or can be found. If it holds more than its floor, others may take
//! the rest of what it has cached in the free queue; its own requests may take all of that. What
//! the taker may not take is passed over, so the order of the queue stays, under any policy.
//! Why: a floor keeps content and reserves no empty block, so a tenant that has cached nothing
//! costs the others nothing. What each tenant holds is counted as blocks change, so that only
//! passing over kept blocks takes time.
//! Twin: kvcore/pool/floors.py.

use smallvec::SmallVec;

use crate::mutants::{Mutant, seeded};
use crate::types::ids::BlockId;

/// The tenant of requests without a floor.
pub(crate) const NO_TENANT: u8 = 0;

/// What a block is for the tenant that took it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Standing {
    /// It has no content.
    Nothing,
    /// It has an owner, or can be found while a batch uses it.
    Held,
    /// It can be found and is in the free queue.
    Cached,
}

/// What a tenant has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// The blocks that the others must leave.
    pub(crate) least: u32,
    /// Blocks that have an owner or can be found.
    pub(crate) held: u32,
    /// Those of them in the free queue.
    pub(crate) cached: u32,
}

impl Counts {
    /// The cached blocks that others may take.
    pub(crate) fn spare(self) -> u32 {
        let held = if seeded(Mutant::FloorsForgetOwners) { self.cached } else { self.held };
        self.cached.min(held.saturating_sub(self.least))
    }
}

/// The floors of a pool.
#[derive(Debug, Clone)]
pub struct Floors {
    /// For each block, the tenant that took it last; they are numbered from 1.
    pub(crate) takers: Vec<u8>,
    /// What is counted of each block.
    pub(crate) standings: Vec<Standing>,
    /// By tenant; the first is that of all without a floor, from whom anything may be taken.
    pub(crate) tenants: Vec<Counts>,
}

/// The blocks that one taker may take from each tenant, while it takes them.
pub(crate) type Spare = SmallVec<[u32; 17]>;

impl Floors {
    /// Count a block as this.
    pub(crate) fn count(&mut self, block: BlockId, standing: Standing) {
        let before = std::mem::replace(&mut self.standings[block.index()], standing);
        let counts = &mut self.tenants[usize::from(self.takers[block.index()])];
        counts.held += u32::from(standing >= Standing::Held);
        counts.held -= u32::from(before >= Standing::Held);
        counts.cached += u32::from(standing == Standing::Cached);
        counts.cached -= u32::from(before == Standing::Cached);
    }
}

/// What each tenant other than the taker lets it take.
pub(crate) fn spare(tenants: &[Counts], taker: u8) -> Spare {
    let left = |(tenant, counts): (usize, &Counts)| match tenant {
        0 => u32::MAX,
        _ if tenant == usize::from(taker) => u32::MAX,
        _ => counts.spare(),
    };
    tenants.iter().enumerate().map(left).collect()
}

/// The floors of a pool from which no block has been taken; None if there are none.
pub(crate) fn make_floors(
    sizes: impl Iterator<Item = u32>,
    num_blocks: u32,
) -> Option<Box<Floors>> {
    let mut tenants = vec![Counts::default()];
    tenants.extend(sizes.map(|least| Counts { least, ..Counts::default() }));
    let size = num_blocks as usize;
    let (takers, standings) = (vec![NO_TENANT; size], vec![Standing::Nothing; size]);
    (tenants.len() > 1).then(|| Box::new(Floors { takers, standings, tenants }))
}
