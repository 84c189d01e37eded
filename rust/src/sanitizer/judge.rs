// SPDX-License-Identifier: Apache-2.0
//! Follows what every slot holds, and judges what the queries of a step read.
//!
//! A write that changes a block with one claim, the writer's, disturbs nobody and looks at no other
//! request; any other looks through the claimed blocks of all.
//! Twin: kvcore/sanitizer/judge.py.

use hashbrown::HashMap;
use rustc_hash::{FxBuildHasher, FxHashSet};

use crate::sanitizer::contents::{Event, Kind, Plane, SERIAL_MASK};
use crate::sanitizer::digests::group_word;
use crate::sanitizer::lines::Wrong;
use crate::sanitizer::requests::{Followed, Tokens};
use crate::sanitizer::rows::CacheGroup;

type FxHashMap<K, V> = HashMap<K, V, FxBuildHasher>;

/// A tier, a pool of blocks, and a block. The device is tier 0.
pub type TierPlace = (u32, usize, u32);
/// The number of the device's tier.
pub const DEVICE: u32 = 0;

/// Contents, tables and verified lengths, changed in the order of issue.
pub struct Judge<T> {
    pub(super) groups: Vec<CacheGroup>,
    pub(super) words: Vec<u64>,
    pub(super) full: bool,
    pub(super) has_rings: bool,
    planes: FxHashMap<(u32, usize), Plane>,
    pub(super) device: Vec<Plane>,
    pub(super) claims: Vec<Vec<u32>>,
    pub(super) requests: FxHashMap<u32, Followed<T>>,
    newest: u32,
    pub(super) epoch: u16,
    pub(super) found: Vec<Wrong>,
    pub(super) disturbed: Vec<(usize, u32)>,
    pub(super) tokens: Vec<i64>,
    pub(super) totals: Vec<u64>,
}

impl<T: Tokens> Judge<T> {
    /// Follow empty pools of this many blocks.
    pub fn new(groups: Vec<CacheGroup>, num_blocks: usize, full: bool) -> Self {
        let num_pools = groups.iter().map(|group| group.pool + 1).max().unwrap_or(0);
        let size_of = |pool| {
            let mine = groups.iter().filter(|group| group.pool == pool);
            mine.map(|group| group.block_size).max().unwrap_or(1)
        };
        Self {
            words: (0..groups.len()).map(group_word).collect(),
            has_rings: groups.iter().any(|group| group.ring),
            device: (0..num_pools).map(|pool| Plane::new(size_of(pool), num_blocks)).collect(),
            claims: vec![vec![0; num_blocks]; num_pools],
            groups,
            full,
            planes: FxHashMap::default(),
            requests: FxHashMap::default(),
            newest: 0,
            epoch: 0,
            found: vec![],
            disturbed: vec![],
            tokens: vec![],
            totals: vec![],
        }
    }

    /// Follow a request from here on; a fork reads what its parent may read.
    pub fn begin(&mut self, serial: u32, tokens: T, base: u64, parent: Option<u32>, judged: bool) {
        let epoch = parent.map_or(self.epoch, |parent| self.requests[&parent].epoch);
        let mut request = Followed::new(serial, tokens, base, epoch, self.groups.len());
        request.judged = judged;
        self.newest = self.newest.max(serial);
        self.requests.insert(serial, request);
    }

    /// Let a request that has no blocks expect KV of the current weights.
    pub fn renew(&mut self, serial: u32) {
        let epoch = self.epoch;
        self.request(serial).epoch = epoch;
    }

    /// Append blocks to a table.
    pub fn extend(&mut self, serial: u32, group_id: usize, blocks: &[u32], step: u32) {
        let group = &self.groups[group_id];
        let pool = group.pool;
        let request = self.requests.get_mut(&serial).expect("the front knows its requests");
        let mut own: Option<FxHashSet<u32>> = None;
        for &block in blocks {
            if block >= group.num_null {
                let index = request.tables[group_id].blocks.len() as u32;
                self.device[pool].happened(block, Kind::Given, step, Some(serial), index);
                let claims = &mut self.claims[pool][block as usize];
                *claims += 1;
                if *claims > 1 && !request.repeats {
                    let own = own.get_or_insert_with(|| claimed(&self.groups, request, pool));
                    request.repeats = own.contains(&block);
                }
                if let Some(own) = &mut own {
                    own.insert(block);
                }
            }
            request.tables[group_id].blocks.push(block);
        }
    }

    /// Give up all tables of a request.
    pub fn drop_tables(&mut self, serial: u32, step: u32) {
        let request = self.requests.get_mut(&serial).expect("the front knows its requests");
        for (group, table) in self.groups.iter().zip(&request.tables) {
            for (at, &block) in table.blocks.iter().enumerate() {
                if block >= group.num_null {
                    let plane = &mut self.device[group.pool];
                    plane.happened(block, Kind::Dropped, step, Some(serial), at as u32);
                    if at >= table.trimmed {
                        self.claims[group.pool][block as usize] -= 1;
                    }
                }
            }
        }
        request.empty_tables();
    }

    /// Follow a request without tables no more.
    pub fn end(&mut self, serial: u32) {
        self.requests.remove(&serial);
    }

    /// Say that the weights changed.
    pub fn advance_epoch(&mut self) {
        self.epoch = self.epoch.saturating_add(1);
    }

    /// Copy a block, and empty the source if it moves.
    pub fn copy(&mut self, source: TierPlace, target: TierPlace, step: u32, moves: bool) {
        let words = self.plane(source).words(source.2).to_vec();
        let plane = self.plane(target);
        let event = plane.happened(target.2, Kind::Copied, step, None, source.2);
        plane.fill(target.2, &words, event);
        self.changed(target);
        if moves {
            self.lose(source, step);
        }
    }

    /// Zero a block.
    pub fn zero(&mut self, place: TierPlace, step: u32) {
        self.plane(place).zero(place.2, step);
        self.changed(place);
    }

    /// Leave a block unwritten.
    pub fn lose(&mut self, place: TierPlace, step: u32) {
        self.plane(place).lose(place.2, step);
        self.changed(place);
    }

    /// The last events of a block, the oldest first.
    pub fn events(&mut self, place: TierPlace) -> Vec<Event> {
        let events = self.plane(place).events(place.2);
        events.into_iter().map(|event| self.whole(event)).collect()
    }

    /// The bytes of contents, events and claims of the device.
    pub fn num_bytes(&self) -> usize {
        let claims: usize = self.claims.iter().map(|pool| pool.capacity() * 4).sum();
        claims + self.device.iter().map(Plane::num_bytes).sum::<usize>()
    }

    /// Disturb the requests, but for the writer, whose blocks were noted. claims: whether the
    /// writer claims them.
    pub(super) fn disturb_others(&mut self, writer: u32, claims: bool) {
        if self.disturbed.is_empty() {
            return;
        }
        let mut blocks = std::mem::take(&mut self.disturbed);
        blocks.dedup();
        for (pool, block) in blocks.drain(..) {
            if self.claims[pool][block as usize] > u32::from(claims) {
                self.disturb(pool, block, Some(writer));
            }
        }
        self.disturbed = blocks;
    }

    fn changed(&mut self, (tier, pool, block): TierPlace) {
        if tier == DEVICE && self.claims[pool][block as usize] > 0 {
            self.disturb(pool, block, None);
        }
    }

    fn disturb(&mut self, pool: usize, block: u32, writer: Option<u32>) {
        for request in self.requests.values_mut() {
            if Some(request.serial) != writer && claims(&self.groups, request, pool, block) {
                request.verified = None;
            }
        }
    }

    fn plane(&mut self, (tier, pool, block): TierPlace) -> &mut Plane {
        if tier == DEVICE {
            return &mut self.device[pool];
        }
        let size = self.device[pool].words(0).len();
        let plane = self.planes.entry((tier, pool)).or_insert_with(|| Plane::new(size, 0));
        plane.reach(block as usize + 1);
        plane
    }

    fn request(&mut self, serial: u32) -> &mut Followed<T> {
        self.requests.get_mut(&serial).expect("the front knows its requests")
    }

    /// An event with the whole serial of its request.
    pub(super) fn whole(&self, event: Event) -> Event {
        Event { serial: event.serial.map(|serial| self.expand(serial)), ..event }
    }

    pub(super) fn expand(&self, serial: u32) -> u32 {
        self.newest.wrapping_sub(self.newest.wrapping_sub(serial) & SERIAL_MASK)
    }
}

/// The blocks of a pool that a request claims.
fn claimed<T>(groups: &[CacheGroup], request: &Followed<T>, pool: usize) -> FxHashSet<u32> {
    let tables = groups.iter().zip(&request.tables).filter(|(group, _)| group.pool == pool);
    tables
        .flat_map(|(group, table)| {
            table.blocks[table.trimmed..].iter().filter(|&&block| block >= group.num_null)
        })
        .copied()
        .collect()
}

pub(super) fn claims<T>(
    groups: &[CacheGroup],
    request: &Followed<T>,
    pool: usize,
    block: u32,
) -> bool {
    groups
        .iter()
        .zip(&request.tables)
        .any(|(group, table)| group.pool == pool && block >= group.num_null && table.claims(block))
}
