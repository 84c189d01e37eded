// SPDX-License-Identifier: Apache-2.0
//! What the eviction policies answer that give places: the rule of each.
//!
//! Twin: kvcore/types/policies.py.

use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;

use crate::types::config::Eviction;
use crate::types::ids::{BlockId, Row};
use crate::types::keys::Key;

/// What orders are below.
pub const ORDERS_END: u64 = 1 << 56;
/// The section of blocks that waiting requests will look up.
pub(crate) const DUE: u8 = 2;
const FIRST: u8 = 1;
const SMALL: u8 = 1;
/// The greatest section.
pub(crate) const MAIN: u8 = 2;
/// For `Learned`: number of kinds, bits of a rate, and the count at which a kind's counts are
/// halved.
const KINDS: usize = 64;
const RATE_BITS: u32 = 16;
const COUNT_MAX: u64 = 1024;

/// Section, and order below it in one word: the lowest leaves first; equal ones leave in the order
/// in which they came.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place(u64);

impl Place {
    pub(crate) const fn new(section: u8, order: u64) -> Self {
        let order = if order < ORDERS_END { order } else { ORDERS_END - 1 };
        Place((section as u64) * ORDERS_END + order)
    }

    pub(crate) const fn section(self) -> u8 {
        (self.0 / ORDERS_END) as u8
    }

    pub(crate) const fn order(self) -> u64 {
        self.0 % ORDERS_END
    }
}

/// The place of blocks without a key, and of a content that was never free.
pub(crate) const KEYLESS: Place = Place::new(0, 0);

/// How a content was used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Uses {
    /// Batches in which it was computed or found; 0: nothing is known of it.
    pub(crate) uses: u32,
    /// Its place in the table that it was computed for.
    pub(crate) depth: u32,
    /// The latest two of those batches, by their numbers and one; 0 for none.
    pub(crate) last: u64,
    pub(crate) before: u64,
    /// Where it stands, or stood when it was free last.
    pub(crate) place: Place,
}

/// What a policy sees of a block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen {
    /// The number of the open batch and one.
    pub(crate) now: u64,
    pub(crate) known: Uses,
    /// The number of the first waiting request that will look its content up.
    pub(crate) due: Option<u64>,
}

/// A section that has blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Front {
    pub(crate) section: u8,
    /// The block that stands in front.
    pub(crate) block: BlockId,
    pub(crate) length: u32,
}

/// The requests in the order of their arrival.
#[derive(Debug, Clone, Default)]
pub(crate) struct Waiting {
    pub(crate) requests: HashMap<Row, WaitingRequest, FxBuildHasher>,
    /// Of the next arrival.
    pub(crate) next_due: u64,
}

/// A request as a policy that goes by waiting requests knows it.
#[derive(Debug, Clone)]
pub(crate) struct WaitingRequest {
    /// Its place in the order of arrival.
    pub(crate) due: u64,
    /// What it will look up while it waits, else none.
    pub(crate) keys: Vec<Key>,
}

impl Eviction {
    /// Whether the free queue is ordered by places that it gives.
    #[must_use]
    pub fn has_places(self) -> bool {
        !matches!(self, Eviction::Lru | Eviction::UncachedFirst | Eviction::Retention)
    }

    /// Whether a block never stays longer than the one before its prefix.
    #[must_use]
    pub fn is_closed(self) -> bool {
        matches!(self, Self::Lru | Self::UncachedFirst | Self::QueueAware | Self::Retention)
    }

    /// Whether it goes by how contents were used.
    #[must_use]
    pub fn remembers(self) -> bool {
        matches!(self, Eviction::Lru2 | Eviction::S3Fifo | Eviction::Learned)
    }

    /// Whether it goes by what waiting requests will look up.
    #[must_use]
    pub fn sees_waiting(self) -> bool {
        self == Eviction::QueueAware
    }

    /// That of a host tier, whose blocks have no keys.
    #[must_use]
    pub fn of_host(self) -> Self {
        match self {
            Eviction::Retention => Eviction::UncachedFirst,
            other if other.has_places() => Eviction::Lru,
            other => other,
        }
    }
}

/// The memory of an empty pool.
pub(crate) fn start(eviction: Eviction) -> Vec<u64> {
    vec![0; if eviction == Eviction::Learned { 1 + 2 * KINDS } else { 0 }]
}

/// A content was found, or computed: again, if it has more than one use.
#[inline]
pub(crate) fn on_use(eviction: Eviction, memory: &mut [u64], known: &Uses) {
    if eviction == Eviction::Learned && known.uses > 1 {
        count_one(memory, 2 + 2 * kind_of(known.uses - 1, known.depth));
    }
}

/// A block became free, or got another due number: where it stands.
pub(crate) fn on_release(eviction: Eviction, memory: &mut [u64], block: &Seen) -> Place {
    let Seen { now, known, due } = *block;
    match eviction {
        Eviction::Lru2 => Place::new(FIRST, known.before),
        Eviction::S3Fifo if known.place != KEYLESS => known.place,
        Eviction::S3Fifo => Place::new(if known.uses == 1 { SMALL } else { MAIN }, now),
        Eviction::Learned => {
            let at = 1 + 2 * kind_of(known.uses, known.depth);
            count_one(memory, at);
            let rate = ((memory[at + 1] + 1) << RATE_BITS) / (memory[at] + 2);
            Place::new(FIRST, memory[0] + rate)
        }
        _ => due.map_or(Place::new(FIRST, 0), |due| Place::new(DUE, ORDERS_END - 1 - due)),
    }
}

/// The most fronts that `take` reads.
pub(crate) const MAX_FRONTS: usize = 2;

/// How many fronts `take` reads; 0 if the first block of the queue leaves without being read.
pub(crate) fn num_fronts(eviction: Eviction) -> usize {
    match eviction {
        Eviction::S3Fifo => MAX_FRONTS,
        Eviction::Learned => 1,
        _ => 0,
    }
}

/// The block that leaves, one of the fronts; with a place, it goes there and stays, and the policy
/// is asked again. seen: what the policy sees of a front.
pub(crate) fn take(
    eviction: Eviction,
    memory: &mut [u64],
    fronts: &[Front],
    seen: impl Fn(BlockId) -> Seen,
) -> (BlockId, Option<Place>) {
    let mut front = &fronts[0];
    if eviction == Eviction::Learned {
        memory[0] = seen(front.block).known.place.order();
        return (front.block, None);
    }
    if fronts.len() > 1 && 9 * u64::from(front.length) < u64::from(fronts[1].length) {
        front = &fronts[1];
    }
    let Seen { now, known, .. } = seen(front.block);
    let stays =
        if front.section == SMALL { known.uses > 2 } else { known.last >= known.place.order() };
    (front.block, stays.then_some(Place::new(MAIN, now)))
}

/// Return the kind of a content, by its uses and the order of magnitude of its depth.
fn kind_of(uses: u32, depth: u32) -> usize {
    let magnitude = (u32::BITS - depth.leading_zeros()).min(7);
    (8 * uses.saturating_sub(1).min(7) + magnitude) as usize
}

/// Count one more at a place; both counts of a kind are halved when one is full.
fn count_one(memory: &mut [u64], at: usize) {
    memory[at] += 1;
    let first = at - (at - 1) % 2;
    if memory[at] == COUNT_MAX {
        memory[first] /= 2;
        memory[first + 1] /= 2;
    }
}
