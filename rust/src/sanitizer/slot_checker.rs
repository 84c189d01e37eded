// SPDX-License-Identifier: Apache-2.0
//! Follows what every slot holds, and checks what the queries of a step read.
//!
//! A write that changes a block with one claim, the writer's, disturbs no request and looks at no
//! other one; any other looks through the claimed blocks of all.
//! Twin: kvcore/sanitizer/slot_checker.py.

mod step;

use hashbrown::HashMap;
use rustc_hash::{FxBuildHasher, FxHashSet};

use crate::sanitizer::chunks::CacheGroup;
use crate::sanitizer::contents::{Event, Kind, Plane, SERIAL_MASK};
use crate::sanitizer::digests::group_word;
use crate::sanitizer::lines::WrongAccess;
use crate::sanitizer::requests::{Followed, Requests, Tokens};

type FxHashMap<K, V> = HashMap<K, V, FxBuildHasher>;

/// A tier, a pool of blocks, and a block. The device is tier 0.
pub type TierPlace = (u32, usize, u32);
/// The number of the device's tier.
pub const DEVICE: u32 = 0;

/// Contents, tables and verified lengths, changed in the order of issue.
pub struct SlotChecker<T> {
    pub(super) groups: Vec<CacheGroup>,
    pub(super) words: Vec<u64>,
    pub(super) full: bool,
    pub(super) has_rings: bool,
    planes: FxHashMap<(u32, usize), Plane>,
    pub(super) device: Vec<Plane>,
    pub(super) requests: Requests<T>,
    newest: u32,
    pub(super) epoch: u16,
    pub(super) found: Vec<WrongAccess>,
    pub(super) disturbed: Vec<(usize, u32)>,
    pub(super) tokens: Vec<i64>,
    pub(super) totals: Vec<u64>,
}

impl<T: Tokens> SlotChecker<T> {
    /// Follow empty pools of this many blocks.
    pub fn new(groups: Vec<CacheGroup>, num_blocks: usize, full: bool) -> Self {
        let num_pools = groups.iter().map(|group| group.pool + 1).max().unwrap_or(0);
        let size_of = |pool| {
            let mine = groups.iter().filter(|group| group.pool == pool);
            mine.map(|group| group.block_size).max().unwrap_or(1)
        };
        Self {
            words: (0..groups.len()).map(group_word).collect(),
            has_rings: groups.iter().any(CacheGroup::reads_first),
            device: (0..num_pools).map(|pool| Plane::new(size_of(pool), num_blocks)).collect(),
            groups,
            full,
            planes: FxHashMap::default(),
            requests: Requests::default(),
            newest: 0,
            epoch: 0,
            found: vec![],
            disturbed: vec![],
            tokens: vec![],
            totals: vec![],
        }
    }

    /// Follow a request from now on; a fork may read what its parent may read.
    pub fn begin(&mut self, serial: u32, tokens: T, base: u64, parent: Option<u32>, checked: bool) {
        let epoch = parent.map_or(self.epoch, |parent| self.requests.get(parent).epoch);
        let mut request = Followed::new(serial, tokens, base, epoch, self.groups.len());
        request.checked = checked;
        self.newest = self.newest.max(serial);
        self.requests.insert(request);
    }

    /// Let a request that has no blocks expect KV of the current weights.
    pub fn renew(&mut self, serial: u32) {
        self.requests.get_mut(serial).epoch = self.epoch;
    }

    /// Put blocks into a table from a place on, replacing those there.
    pub fn extend(
        &mut self,
        serial: u32,
        group_id: usize,
        position: usize,
        blocks: &[u32],
        step: u32,
    ) {
        let group = self.groups[group_id];
        let request = self.requests.get_mut(serial);
        let plane = &mut self.device[group.pool];
        let mut own: Option<FxHashSet<u32>> = None;
        for (at, &block) in (position..).zip(blocks) {
            let table = &mut request.tables[group_id];
            if let Some(&before) = table.blocks.get(at) {
                release(plane, &group, request, group_id, at, step);
                own = own.filter(|own| !own.contains(&before));
                request.tables[group_id].blocks[at] = group.num_null.wrapping_sub(1);
            } else {
                table.blocks.push(group.num_null.wrapping_sub(1));
            }
            if block >= group.num_null {
                plane.happened(block, Kind::Given, step, Some(serial), at as u32);
                if at >= request.tables[group_id].trimmed && plane.claim(block) > 1 {
                    let find = || claimed(&self.groups, request, group.pool);
                    request.repeats |= own.get_or_insert_with(find).contains(&block);
                }
            }
            request.tables[group_id].blocks[at] = block;
            if let Some(own) = &mut own {
                own.insert(block);
            }
        }
        forget_from(request, &group, position, self.epoch);
    }

    /// Put blocks behind those of a table.
    pub fn append(&mut self, serial: u32, group_id: usize, blocks: &[u32], step: u32) {
        let length = self.requests.get(serial).tables[group_id].blocks.len();
        self.extend(serial, group_id, length, blocks, step);
    }

    /// Shorten a table to this many blocks.
    pub fn cut(&mut self, serial: u32, group_id: usize, length: usize, step: u32) {
        let group = self.groups[group_id];
        let request = self.requests.get_mut(serial);
        for at in length..request.tables[group_id].blocks.len() {
            release(&mut self.device[group.pool], &group, request, group_id, at, step);
        }
        let table = &mut request.tables[group_id];
        table.blocks.truncate(length);
        table.trimmed = table.trimmed.min(length);
        forget_from(request, &group, length, self.epoch);
    }

    /// Give up all tables of a request.
    pub fn drop_tables(&mut self, serial: u32, step: u32) {
        for group_id in 0..self.groups.len() {
            self.cut(serial, group_id, 0, step);
        }
        self.requests.get_mut(serial).empty_tables();
    }

    /// Give up all tables of a request, and stop following it.
    pub fn end(&mut self, serial: u32, step: u32) {
        self.drop_tables(serial, step);
        self.requests.remove(serial);
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
        plane.fill(target.2, words.into_iter(), event);
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

    /// Return the last events of a block, the oldest first.
    pub fn events(&mut self, place: TierPlace) -> Vec<Event> {
        let events = self.plane(place).events(place.2);
        events.into_iter().map(|event| self.whole(event)).collect()
    }

    /// Return the bytes of contents, events and claims of the device.
    pub fn num_bytes(&self) -> usize {
        self.device.iter().map(Plane::num_bytes).sum()
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
            if self.device[pool].claims(block) > u32::from(claims) {
                self.disturb(pool, block, Some(writer));
            }
        }
        self.disturbed = blocks;
    }

    fn changed(&mut self, (tier, pool, block): TierPlace) {
        if tier == DEVICE && self.device[pool].claims(block) > 0 {
            self.disturb(pool, block, None);
        }
    }

    fn disturb(&mut self, pool: usize, block: u32, writer: Option<u32>) {
        for request in self.requests.all_mut() {
            if Some(request.serial) != writer && claims(&self.groups, request, pool, block) {
                request.verified = None;
            }
        }
    }

    fn plane(&mut self, (tier, pool, block): TierPlace) -> &mut Plane {
        if tier == DEVICE {
            return &mut self.device[pool];
        }
        let size = self.device[pool].num_slots();
        let plane = self.planes.entry((tier, pool)).or_insert_with(|| Plane::new(size, 0));
        plane.reach(block as usize + 1);
        plane
    }

    /// An event with the whole serial of its request.
    pub(super) fn whole(&self, event: Event) -> Event {
        Event { serial: event.serial.map(|serial| self.expand(serial)), ..event }
    }

    pub(super) fn expand(&self, serial: u32) -> u32 {
        self.newest.wrapping_sub(self.newest.wrapping_sub(serial) & SERIAL_MASK)
    }
}

/// Lower the verified length to the blocks before a place of a table.
fn forget_from<T: Tokens>(
    request: &mut Followed<T>,
    group: &CacheGroup,
    position: usize,
    epoch: u16,
) {
    if group.ring {
        request.verified = None;
    }
    request.forget_from(position * group.block_size, epoch);
}

/// Give up the block at a place of a table.
fn release<T>(
    plane: &mut Plane,
    group: &CacheGroup,
    request: &Followed<T>,
    group_id: usize,
    at: usize,
    step: u32,
) {
    let table = &request.tables[group_id];
    let block = table.blocks[at];
    if block >= group.num_null {
        plane.happened(block, Kind::Dropped, step, Some(request.serial), at as u32);
        if at >= table.trimmed {
            plane.unclaim(block);
        }
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
