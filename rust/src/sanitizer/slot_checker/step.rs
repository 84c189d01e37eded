// SPDX-License-Identifier: Apache-2.0
//! One step: its chunks write, and what their queries see is read.
//!
//! Twin: kvcore/sanitizer/slot_checker.py.

use crate::sanitizer::chunks::{CacheGroup, Chunk};
use crate::sanitizer::contents::{Event, Held, Plane, SERIAL_MASK};
use crate::sanitizer::digests::{NOTHING, UNKNOWN, ZEROS, slot_digest};
use crate::sanitizer::lines::{Line, Run, SlotAddress, WrongAccess};
use crate::sanitizer::requests::{Followed, Tokens};
use crate::sanitizer::slot_checker::{SlotChecker, claims};

impl<T: Tokens> SlotChecker<T> {
    /// Write and read what the chunks of a step do; return the errors, at most one per chunk.
    pub fn step(&mut self, step: u32, chunks: &[Chunk]) -> Vec<WrongAccess> {
        self.totals.clear();
        let chunks = chunks.iter().filter(|chunk| chunk.num_tokens > 0);
        let mut lines: Vec<Line> = chunks.map(|chunk| self.line(chunk)).collect();
        for line in &mut lines {
            self.set_out(line);
            if self.has_rings {
                self.read(line, step, true);
            }
        }
        for line in &mut lines {
            self.write(line, step);
        }
        for line in &mut lines {
            self.read(line, step, false);
            self.record_verified(line);
        }
        self.take_found()
    }

    /// Write loaded content, like a step that reads nothing.
    pub fn load(
        &mut self,
        serial: u32,
        group_id: Option<usize>,
        (start, count): (usize, usize),
        step: u32,
    ) -> Vec<WrongAccess> {
        let chunk = Chunk { serial, start, num_tokens: count, ..Chunk::default() };
        let mut line = self.line(&chunk);
        (line.loads, line.group_id) = (true, group_id);
        self.totals.clear();
        self.requests.at_mut(line.place).forget_from(start, self.epoch);
        self.write(&mut line, step);
        self.take_found()
    }

    fn line<'a>(&self, chunk: &'a Chunk) -> Line<'a> {
        let (end, place) = (chunk.start + chunk.num_tokens, self.requests.place(chunk.serial));
        let (oldest_epoch, begin, sums) = (self.epoch, chunk.start, (0, 0));
        Line {
            chunk,
            place,
            end,
            begin,
            sums,
            oldest_epoch,
            written: 0,
            loads: false,
            group_id: None,
            wrong: false,
        }
    }

    fn take_found(&mut self) -> Vec<WrongAccess> {
        let mut found = std::mem::take(&mut self.found);
        for wrong in &mut found {
            wrong.event = wrong.event.map(|(event, delta)| (self.whole(event), delta));
        }
        found
    }

    /// Lower the verified length if a chunk goes back, and set the epoch of its writes.
    fn set_out(&mut self, line: &mut Line) {
        let chunk = line.chunk;
        if chunk.slots.is_some() {
            return;
        }
        let request = self.requests.at_mut(line.place);
        if self.has_rings && request.verified.is_some_and(|verified| chunk.start < verified) {
            request.verified = None;
        }
        request.forget_from(chunk.start, self.epoch);
        for (group, table) in self.groups.iter().zip(&mut request.tables) {
            if group.ring {
                continue;
            }
            let first = (group.first(chunk.start) / group.block_size).min(table.blocks.len());
            let (before, plane) = (table.trimmed, &mut self.device[group.pool]);
            for &block in table.blocks.get(before..first).unwrap_or_default() {
                if block >= group.num_null {
                    plane.unclaim(block);
                }
            }
            for &block in table.blocks.get(first..before).unwrap_or_default() {
                request.verified = None;
                if block >= group.num_null {
                    plane.claim(block);
                }
            }
            table.trimmed = first;
        }
        for (group, table) in self.groups.iter().zip(&request.tables) {
            if let Some(&block) = table.blocks.get(chunk.start / group.block_size) {
                self.device[group.pool].prefetch(block, chunk.start % group.block_size);
            }
        }
        if chunk.start > 0 && request.verified.is_some_and(|verified| verified > 0) {
            line.oldest_epoch = self.epoch.min(request.oldest_epoch);
        }
    }

    /// Sum the prefixes of a chunk that end at a position or behind it.
    fn sum(&mut self, line: &mut Line, begin: usize) {
        let (from, drafts) = (self.totals.len(), &line.chunk.drafts);
        let scratch = (&mut self.tokens, &mut self.totals);
        let request = self.requests.at_mut(line.place);
        request.totals((begin, line.end), drafts, self.full, scratch);
        (line.begin, line.sums) = (begin, (from, self.totals.len()));
    }

    fn write(&mut self, line: &mut Line, step: u32) {
        let chunk = line.chunk;
        line.written = line.oldest_epoch;
        let request = self.requests.at_mut(line.place);
        let verified = request.verified.unwrap_or(0);
        let begin = if request.checked { chunk.start.min(verified) } else { chunk.start };
        self.sum(line, begin);
        let mut wrong = None;
        for run in line.written(self.groups.len()) {
            let group = self.groups[run.group_id];
            for position in run.first_write(&group)..run.end {
                if run.skips(position) {
                    continue;
                }
                let request = self.requests.at(line.place);
                let place = run.place(&group, &request.tables[run.group_id], position);
                if line.loads && place.is_some_and(|place| place.block < group.num_null) {
                    continue;
                }
                let Some(place) = place.filter(|place| place.block >= group.num_null) else {
                    wrong = wrong.or(Some((run.group_id, position, place)));
                    break;
                };
                let total = line.total(&self.totals, position);
                let word = self.words[run.group_id];
                let digest = total.map_or(UNKNOWN, |total| slot_digest(total, word));
                self.put(
                    line,
                    run,
                    position,
                    place,
                    Held { digest, oldest_epoch: line.oldest_epoch },
                    step,
                );
            }
            if let Some((group_id, position, place)) = wrong.take() {
                self.find_place(line, "null-write", group_id, position, place, step);
            }
        }
        self.disturb_others(chunk.serial, line.claims());
    }

    /// Write a slot, and note its block if that changes it.
    fn put(
        &mut self,
        line: &mut Line,
        run: Run,
        position: usize,
        place: SlotAddress,
        held: Held,
        step: u32,
    ) {
        let (serial, pool) = (line.chunk.serial, self.groups[run.group_id].pool);
        let SlotAddress { index, block, offset } = place;
        let plane = &mut self.device[pool];
        let (event, given) = plane.written_by(block, serial, index, step);
        let before = plane.held(block, offset);
        let is_shared = plane.claims(block) > u32::from(line.claims());
        if is_shared && (before != held || held.digest == UNKNOWN) {
            self.disturbed.push((pool, block));
            let writer = plane.writer(block, offset);
            if ![held.digest, NOTHING, ZEROS].contains(&before.digest) {
                self.suspect_alias(line, run.group_id, position, place, before, writer, step);
            }
        }
        self.device[pool].put(block, offset, held, event, step - given);
    }

    #[allow(clippy::too_many_arguments)] // they are the fields of the finding
    fn suspect_alias(
        &mut self,
        line: &Line,
        group_id: usize,
        position: usize,
        place: SlotAddress,
        held: Held,
        event: Option<(Event, u16)>,
        step: u32,
    ) {
        let Some((Event { serial: Some(writer), .. }, _)) = event else { return };
        let (writer, pool) = (self.expand(writer), self.groups[group_id].pool);
        let Some(other) = self.requests.find(writer) else { return };
        if writer != line.chunk.serial && claims(&self.groups, other, pool, place.block) {
            self.found.push(WrongAccess {
                name: "alias",
                serial: line.chunk.serial,
                group_id,
                start: line.chunk.start,
                position,
                block: Some(place.block),
                slot: Some(place.offset),
                held: Some(held),
                event,
                step,
            });
        }
    }

    /// Return the first wrong slot that the queries of a chunk see.
    fn read(&mut self, line: &mut Line, step: u32, rings: bool) {
        let chunk = line.chunk;
        let request = self.requests.at_mut(line.place);
        if !request.checked || line.wrong {
            return;
        }
        let known = request.verified;
        let whole = self.full || request.repeats || known.is_none() || chunk.slots.is_some();
        if !whole && known.is_some_and(|known| known >= chunk.start) {
            return;
        }
        let lowest = if whole { 0 } else { known.unwrap_or(0) };
        let firsts = self.groups.iter().map(|group| group.first(chunk.start));
        let begin = if chunk.slots.is_some() { 0 } else { lowest.max(firsts.min().unwrap_or(0)) };
        if begin < line.begin || line.sums.1 == 0 {
            self.sum(line, begin);
        }
        for group_id in 0..self.groups.len() {
            let group = &self.groups[group_id];
            let Some(run) = line.visible(group_id, group, (rings, lowest, whole)) else { continue };
            let request = self.requests.at(line.place);
            for position in run.first..run.end {
                let place = run.place(group, &request.tables[group_id], position);
                let Some(place) = place.filter(|place| place.block >= group.num_null) else {
                    self.find_place(line, "null-read", group_id, position, place, step);
                    return;
                };
                let total = line.total(&self.totals, position);
                let plane = &self.device[group.pool];
                let held = plane.held(place.block, place.offset);
                let wanted = total.map(|total| slot_digest(total, self.words[group_id]));
                if wanted == Some(held.digest) && held.oldest_epoch >= request.epoch {
                    line.oldest_epoch = line.oldest_epoch.min(held.oldest_epoch);
                } else if let Some(name) =
                    wrong_name(group, request, position >= chunk.start, plane, place, wanted)
                {
                    if name == "stale-weights" {
                        line.oldest_epoch = line.oldest_epoch.min(held.oldest_epoch);
                    }
                    let event = plane.writer(place.block, place.offset);
                    let held = Some((held, event));
                    self.find(line, name, group_id, position, Some(place), held, step);
                    return;
                }
            }
        }
    }

    /// Apply an older epoch that was read to the chunk's writes, and set the verified length.
    fn record_verified(&mut self, line: &mut Line) {
        let chunk = line.chunk;
        if line.oldest_epoch < line.written {
            for run in line.written(self.groups.len()) {
                self.lower(line, run);
            }
            self.disturb_others(chunk.serial, line.claims());
        }
        if chunk.slots.is_some() {
            return;
        }
        let request = self.requests.at_mut(line.place);
        let known = (line.end - chunk.drafts.len()).min(request.tokens.len());
        let is_over = |(group, length): (&CacheGroup, usize)| {
            group.ring && line.end > length * group.block_size + group.first(known)
        };
        let lengths = request.tables.iter().map(|table| table.blocks.len());
        let overtakes = self.has_rings && self.groups.iter().zip(lengths).any(is_over);
        let disturbed = self.has_rings && request.verified.is_none();
        request.verified = (!disturbed && !line.wrong && !overtakes).then_some(known);
        request.oldest_epoch = line.oldest_epoch;
    }

    fn lower(&mut self, line: &Line, run: Run) {
        let (serial, group) = (line.chunk.serial, &self.groups[run.group_id]);
        let table = &self.requests.at(line.place).tables[run.group_id];
        let plane = &mut self.device[group.pool];
        let positions = run.first_write(group)..run.end;
        for position in positions.filter(|&position| !run.skips(position)) {
            let place = run.place(group, table, position);
            let Some(place) = place.filter(|place| place.block >= group.num_null) else { break };
            let writer = plane.writer(place.block, place.offset);
            let is_own =
                writer.is_some_and(|(event, _)| event.serial == Some(serial & SERIAL_MASK));
            if is_own && plane.held(place.block, place.offset).oldest_epoch > line.oldest_epoch {
                plane.set_oldest_epoch(place.block, place.offset, line.oldest_epoch);
                self.disturbed.push((group.pool, place.block));
            }
        }
    }

    fn find_place(
        &mut self,
        line: &mut Line,
        null: &'static str,
        group_id: usize,
        position: usize,
        place: Option<SlotAddress>,
        step: u32,
    ) {
        let name = if place.is_some() { null } else { "no-slot" };
        self.find(line, name, group_id, position, place, None, step);
    }

    #[allow(clippy::too_many_arguments)] // they are the fields of the finding
    fn find(
        &mut self,
        line: &mut Line,
        name: &'static str,
        group_id: usize,
        position: usize,
        place: Option<SlotAddress>,
        held: Option<(Held, Option<(Event, u16)>)>,
        step: u32,
    ) {
        let request = self.requests.at_mut(line.place);
        if !request.checked {
            return;
        }
        (line.wrong, request.checked) = (true, false);
        self.found.push(WrongAccess {
            name,
            serial: line.chunk.serial,
            group_id,
            start: line.chunk.start,
            position,
            block: place.map(|place| place.block),
            slot: place.map(|place| place.offset),
            held: held.map(|(held, _)| held),
            event: held.and_then(|(_, event)| event),
            step,
        });
    }
}

/// What is wrong with what a slot holds; None if nothing is.
fn wrong_name<T>(
    group: &CacheGroup,
    request: &Followed<T>,
    in_chunk: bool,
    plane: &Plane,
    place: SlotAddress,
    wanted: Option<u64>,
) -> Option<&'static str> {
    let held = plane.held(place.block, place.offset);
    match wanted {
        None => {
            let writer = plane.writer(place.block, place.offset);
            let mine = Some(request.serial & SERIAL_MASK);
            let is_own = writer.is_none_or(|(event, _)| event.serial == mine);
            (in_chunk && !(held.digest == UNKNOWN && is_own)).then_some("wrong-kv")
        }
        Some(_) if held.digest == ZEROS && group.zeros_readable => None,
        Some(_) if matches!(held.digest, NOTHING | ZEROS) => Some("unwritten-read"),
        Some(wanted) if held.digest != wanted => Some("wrong-kv"),
        Some(_) => Some("stale-weights"),
    }
}
