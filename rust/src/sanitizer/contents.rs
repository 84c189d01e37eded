// SPDX-License-Identifier: Apache-2.0
//! What every slot holds, who wrote it, and the last events of every block.
//!
//! Invariants: a slot is 10 bytes, a word (48 bits of digest, 16 of the oldest weights) and a stamp
//! (which of its block's events it was written under, and how many steps behind). A block has 88
//! more: 8 events of 10 bytes, where the next one goes, and how many tables claim it. The stamps of
//! an event that is overwritten are cleared, so a stamp never names a later event.
//!
//! Why: a record of one block holds all of it, 256 bytes at 16 slots: a write of a decode step
//! touches two or three cache lines, which `prefetch` asks for ahead of it.
//! Twin: kvcore/sanitizer/contents.py.

use crate::pool::prefetch::prefetch;
use crate::sanitizer::digests::{NOTHING, ZEROS};

/// How many events a block keeps.
pub const NUM_EVENTS: usize = 8;
/// The step of a write is known up to this many steps after its event.
pub const DELTA_MAX: u16 = 4095;
const INDEX_BITS: u32 = 21;
const LOW_BITS: u32 = 16;
const FORGOTTEN: u16 = 0;
/// Cells of a record, of 64 bits: claims and where the next event goes, then the events in ten (the
/// step, the serial and 8 bits of the rest; the other 16 bits), then stamps, then words.
const EVENTS: usize = 1;
const STAMPS: usize = 11;
const LINE: usize = 8;

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

/// The content of a slot: the digest of a prefix and the oldest weights that it was computed by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    pub digest: u64,
    pub oldest_epoch: u16,
}

/// The blocks of a pool in a tier.
pub struct Plane {
    num_slots: usize,
    words: usize,
    stride: usize,
    cells: Vec<u64>,
}

impl Plane {
    /// Empty blocks.
    pub fn new(num_slots: usize, num_blocks: usize) -> Self {
        let words = STAMPS + num_slots.div_ceil(4);
        let stride = (words + num_slots).next_multiple_of(LINE);
        Self { num_slots, words, stride, cells: vec![0; num_blocks * stride] }
    }

    /// Have at least this many blocks.
    pub fn reach(&mut self, num_blocks: usize) {
        let num_cells = num_blocks * self.stride;
        self.cells.resize(num_cells.max(self.cells.len()), 0);
    }

    /// Ask for what a write to a slot touches.
    pub fn prefetch(&self, block: u32, offset: usize) {
        let first = block as usize * self.stride;
        prefetch(&self.cells, first);
        prefetch(&self.cells, first + LINE);
        prefetch(&self.cells, first + self.words + offset);
    }

    /// How many times tables claim a block.
    pub fn claims(&self, block: u32) -> u32 {
        (self.cells[block as usize * self.stride] >> 32) as u32
    }

    /// Claim a block once more; how many times it is claimed now.
    pub fn claim(&mut self, block: u32) -> u32 {
        self.cells[block as usize * self.stride] += 1 << 32;
        self.claims(block)
    }

    /// Take a claim of a block back.
    pub fn unclaim(&mut self, block: u32) {
        self.cells[block as usize * self.stride] -= 1 << 32;
    }

    /// The content of a slot.
    pub fn held(&self, block: u32, offset: usize) -> Held {
        let word = self.cells[self.word(block, offset)];
        Held { digest: word >> LOW_BITS, oldest_epoch: word as u16 }
    }

    /// Write a slot under an event of its block.
    pub fn put(&mut self, block: u32, offset: usize, held: Held, event: u8, delta: u32) {
        let at = self.word(block, offset);
        self.cells[at] = held.digest << LOW_BITS | u64::from(held.oldest_epoch);
        self.set_stamp(block, offset, stamp(event, delta));
    }

    /// Lower the weights of a slot.
    pub fn set_oldest_epoch(&mut self, block: u32, offset: usize, oldest_epoch: u16) {
        let at = self.word(block, offset);
        self.cells[at] = self.cells[at] >> LOW_BITS << LOW_BITS | u64::from(oldest_epoch);
    }

    /// The event under which a slot was written and the steps since, None if it is forgotten.
    pub fn writer(&self, block: u32, offset: usize) -> Option<(Event, u16)> {
        let cell = self.cells[block as usize * self.stride + STAMPS + offset / 4];
        let stamp = (cell >> (offset % 4 * 16)) as u16;
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
        let first = block as usize * self.stride;
        let (next, is_full) = (self.cells[first] as u8 & 7, self.cells[first] & 8);
        let end = if next == 7 { 8 } else { u64::from(next + 1) | is_full };
        self.cells[first] = self.cells[first] >> 8 << 8 | end;
        if is_full != 0 {
            self.forget_event(block, next);
        }
        let serial = serial.unwrap_or(0) & SERIAL_MASK;
        let what = (kind as u32) << INDEX_BITS | index.min((1 << INDEX_BITS) - 1);
        let number = usize::from(next);
        self.cells[first + EVENTS + number] =
            u64::from(step) << 32 | u64::from(serial) << 8 | u64::from(what & 0xFF);
        let rest = &mut self.cells[first + EVENTS + NUM_EVENTS + number / 4];
        let shift = number % 4 * 16;
        *rest = *rest & !(0xFFFF << shift) | u64::from(what >> 8) << shift;
        next
    }

    /// Return the last event by which a request has this block at a place of its table.
    pub fn written_by(&mut self, block: u32, serial: u32, index: u32, step: u32) -> (u8, u32) {
        let end = self.cells[block as usize * self.stride] as u8;
        let count = if end & 8 != 0 { 8 } else { end & 7 };
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
        let end = self.cells[block as usize * self.stride] as u8;
        let numbers = if end & 8 != 0 { (end & 7)..(end & 7) + 8 } else { 0..end & 7 };
        numbers.map(|number| self.event(block, number & 7)).collect()
    }

    /// All slots of a block.
    pub fn words(&self, block: u32) -> &[u64] {
        let first = self.word(block, 0);
        &self.cells[first..first + self.num_slots]
    }

    /// Replace all slots of a block by words under one event.
    pub fn fill(&mut self, block: u32, words: impl Iterator<Item = u64>, event: u8) {
        for (offset, word) in words.take(self.num_slots).enumerate() {
            let at = self.word(block, offset);
            self.cells[at] = word;
            self.set_stamp(block, offset, stamp(event, 0));
        }
    }

    /// Zero all slots of a block.
    pub fn zero(&mut self, block: u32, step: u32) {
        let event = self.happened(block, Kind::Zeroed, step, None, 0);
        self.fill(block, std::iter::repeat(ZEROS << LOW_BITS), event);
    }

    /// Leave a block unwritten.
    pub fn lose(&mut self, block: u32, step: u32) {
        let event = self.happened(block, Kind::Lost, step, None, 0);
        self.fill(block, std::iter::repeat(NOTHING), event);
    }

    /// How many slots a block has.
    pub fn num_slots(&self) -> usize {
        self.num_slots
    }

    /// The bytes of all records.
    pub fn num_bytes(&self) -> usize {
        self.cells.capacity() * size_of::<u64>()
    }

    fn word(&self, block: u32, offset: usize) -> usize {
        block as usize * self.stride + self.words + offset
    }

    fn event(&self, block: u32, number: u8) -> Event {
        let (first, number) = (block as usize * self.stride + EVENTS, usize::from(number));
        let cell = self.cells[first + number];
        let rest = self.cells[first + NUM_EVENTS + number / 4] >> (number % 4 * 16) & 0xFFFF;
        let what = (rest << 8 | cell & 0xFF) as u32;
        let kind = KINDS[(what >> INDEX_BITS) as usize];
        Event {
            kind,
            step: (cell >> 32) as u32,
            serial: kind.has_request().then_some((cell >> 8) as u32 & SERIAL_MASK),
            index: what & ((1 << INDEX_BITS) - 1),
        }
    }

    fn set_stamp(&mut self, block: u32, offset: usize, stamp: u16) {
        let cell = &mut self.cells[block as usize * self.stride + STAMPS + offset / 4];
        let shift = offset % 4 * 16;
        *cell = *cell & !(0xFFFF << shift) | u64::from(stamp) << shift;
    }

    /// Clear the stamps of an event that is about to be overwritten.
    fn forget_event(&mut self, block: u32, number: u8) {
        let first = block as usize * self.stride;
        for cell in &mut self.cells[first + STAMPS..first + self.words] {
            for shift in [0, 16, 32, 48] {
                if *cell >> shift >> 12 & 0xF == u64::from(number) + 1 {
                    *cell &= !(0xFFFF << shift);
                }
            }
        }
    }
}

fn stamp(event: u8, delta: u32) -> u16 {
    (u16::from(event) + 1) << 12 | (delta.min(u32::from(DELTA_MAX)) as u16)
}
