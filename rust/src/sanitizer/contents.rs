// SPDX-License-Identifier: Apache-2.0
//! What every slot holds, who wrote it, and the last events of every block.
//!
//! Invariants: a slot is 10 bytes, a word (48 bits of digest, 16 of the oldest weights) and a stamp
//! (which of its block's events it was written under, and how many steps behind). A block has 81
//! more: 8 events of 10 bytes, and where the next one goes. The stamps of an event that is
//! overwritten are cleared, so a stamp never names a later event.
//!
//! Why: with the claims of `judge.rs` that is 15.3 bytes per slot at 16 slots per block.
//! Twin: kvcore/sanitizer/contents.py.

use crate::sanitizer::digests::{NOTHING, ZEROS};

/// How many events a block keeps.
pub const NUM_EVENTS: usize = 8;
/// Up to this many steps behind its event the step of a write is known.
pub const DELTA_MAX: u16 = 4095;
const INDEX_BITS: u32 = 21;
const LOW_BITS: u32 = 16;
const FORGOTTEN: u16 = 0;

/// What happened to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Given,
    Dropped,
    Written,
    Copied,
    Zeroed,
    Lost,
}

const KINDS: [Kind; 6] =
    [Kind::Given, Kind::Dropped, Kind::Written, Kind::Copied, Kind::Zeroed, Kind::Lost];

impl Kind {
    /// Whether a request has the block by this event, and may have written it.
    pub fn gives(self) -> bool {
        matches!(self, Kind::Given | Kind::Written)
    }

    /// Its name in Python.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Given => "given",
            Kind::Dropped => "dropped",
            Kind::Written => "written",
            Kind::Copied => "copied",
            Kind::Zeroed => "zeroed",
            Kind::Lost => "lost",
        }
    }

    fn has_request(self) -> bool {
        matches!(self, Kind::Given | Kind::Dropped | Kind::Written)
    }
}

/// An event of a block. serial: the low 24 bits of the request's, None if it was of none. index:
/// the block's place in that request's table, or the block that was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    pub kind: Kind,
    pub step: u32,
    pub serial: Option<u32>,
    pub index: u32,
}

/// The low bits of a serial that an event keeps.
pub const SERIAL_MASK: u32 = 0xFF_FFFF;

#[derive(Clone, Copy, Default)]
struct Packed {
    step: [u8; 4],
    serial: [u8; 3],
    what: [u8; 3],
}

/// The content of a slot: the digest of a prefix and the oldest weights that it was computed by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    pub digest: u64,
    pub low: u16,
}

/// The blocks of a pool in a tier.
pub struct Plane {
    num_slots: usize,
    words: Vec<u64>,
    stamps: Vec<u16>,
    events: Vec<Packed>,
    ends: Vec<u8>,
}

impl Plane {
    /// Empty blocks.
    pub fn new(num_slots: usize, num_blocks: usize) -> Self {
        let mut plane =
            Self { num_slots, words: vec![], stamps: vec![], events: vec![], ends: vec![] };
        plane.reach(num_blocks);
        plane
    }

    /// Have at least this many blocks.
    pub fn reach(&mut self, num_blocks: usize) {
        if num_blocks > self.ends.len() {
            self.words.resize(num_blocks * self.num_slots, NOTHING);
            self.stamps.resize(num_blocks * self.num_slots, FORGOTTEN);
            self.events.resize(num_blocks * NUM_EVENTS, Packed::default());
            self.ends.resize(num_blocks, 0);
        }
    }

    /// The content of a slot.
    pub fn held(&self, block: u32, offset: usize) -> Held {
        let word = self.words[block as usize * self.num_slots + offset];
        Held { digest: word >> LOW_BITS, low: word as u16 }
    }

    /// Write a slot under an event of its block; the content before it.
    pub fn put(&mut self, block: u32, offset: usize, held: Held, event: u8, delta: u32) -> Held {
        let before = self.held(block, offset);
        let at = block as usize * self.num_slots + offset;
        self.words[at] = held.digest << LOW_BITS | u64::from(held.low);
        self.stamps[at] = stamp(event, delta);
        before
    }

    /// Lower the weights of a slot.
    pub fn set_low(&mut self, block: u32, offset: usize, low: u16) {
        let at = block as usize * self.num_slots + offset;
        self.words[at] = self.words[at] >> LOW_BITS << LOW_BITS | u64::from(low);
    }

    /// The event under which a slot was written and the steps since, None if it is forgotten.
    pub fn writer(&self, block: u32, offset: usize) -> Option<(Event, u16)> {
        let stamp = self.stamps[block as usize * self.num_slots + offset];
        (stamp != FORGOTTEN)
            .then(|| (self.event(block, (stamp >> 12) as u8 - 1), stamp & DELTA_MAX))
    }

    /// Append an event; its number.
    pub fn happened(
        &mut self,
        block: u32,
        kind: Kind,
        step: u32,
        serial: Option<u32>,
        index: u32,
    ) -> u8 {
        let end = &mut self.ends[block as usize];
        let (next, is_full) = (*end & 7, *end & 8);
        *end = if next == 7 { 8 } else { next + 1 | is_full };
        if is_full != 0 {
            let first = block as usize * self.num_slots;
            for stamp in &mut self.stamps[first..first + self.num_slots] {
                if *stamp >> 12 == u16::from(next) + 1 {
                    *stamp = FORGOTTEN;
                }
            }
        }
        let what = (kind as u32) << INDEX_BITS | index.min((1 << INDEX_BITS) - 1);
        let [serial, what] = [serial.unwrap_or(0), what].map(|number| {
            let [first, second, third, _] = number.to_le_bytes();
            [first, second, third]
        });
        let packed = Packed { step: step.to_le_bytes(), serial, what };
        self.events[block as usize * NUM_EVENTS + usize::from(next)] = packed;
        next
    }

    /// The last event by which a request has this block at a place of its table.
    pub fn written_by(&mut self, block: u32, serial: u32, index: u32, step: u32) -> (u8, u32) {
        let end = self.ends[block as usize];
        let count = if end & 8 != 0 { 8 } else { end };
        for back in 1..=count {
            let number = (end & 7).wrapping_sub(back) & 7;
            let event = self.event(block, number);
            let is_mine = event.serial == Some(serial & SERIAL_MASK) && event.index == index;
            if is_mine && event.kind.gives() {
                return (number, event.step);
            }
        }
        (self.happened(block, Kind::Written, step, Some(serial), index), step)
    }

    /// The events of a block, the oldest first.
    pub fn events(&self, block: u32) -> Vec<Event> {
        let end = self.ends[block as usize];
        let numbers = if end & 8 != 0 { (end & 7)..(end & 7) + 8 } else { 0..end };
        numbers.map(|number| self.event(block, number & 7)).collect()
    }

    /// All slots of a block.
    pub fn words(&self, block: u32) -> &[u64] {
        let first = block as usize * self.num_slots;
        &self.words[first..first + self.num_slots]
    }

    /// Replace all slots of a block by words under one event.
    pub fn fill(&mut self, block: u32, words: &[u64], event: u8) {
        let first = block as usize * self.num_slots;
        self.words[first..first + self.num_slots].copy_from_slice(words);
        self.stamps[first..first + self.num_slots].fill(stamp(event, 0));
    }

    /// Zero all slots of a block.
    pub fn zero(&mut self, block: u32, step: u32) {
        let event = self.happened(block, Kind::Zeroed, step, None, 0);
        self.fill(block, &vec![ZEROS << LOW_BITS; self.num_slots], event);
    }

    /// Leave a block unwritten.
    pub fn lose(&mut self, block: u32, step: u32) {
        let event = self.happened(block, Kind::Lost, step, None, 0);
        self.fill(block, &vec![NOTHING; self.num_slots], event);
    }

    /// The bytes of contents and events.
    pub fn num_bytes(&self) -> usize {
        let slots = self.words.capacity() * 8 + self.stamps.capacity() * 2;
        slots + self.events.capacity() * size_of::<Packed>() + self.ends.capacity()
    }

    fn event(&self, block: u32, number: u8) -> Event {
        let packed = self.events[block as usize * NUM_EVENTS + usize::from(number)];
        let [serial, what] = [packed.serial, packed.what]
            .map(|[first, second, third]| u32::from_le_bytes([first, second, third, 0]));
        let kind = KINDS[(what >> INDEX_BITS) as usize];
        Event {
            kind,
            step: u32::from_le_bytes(packed.step),
            serial: kind.has_request().then_some(serial),
            index: what & ((1 << INDEX_BITS) - 1),
        }
    }
}

fn stamp(event: u8, delta: u32) -> u16 {
    (u16::from(event) + 1) << 12 | (delta.min(u32::from(DELTA_MAX)) as u16)
}
