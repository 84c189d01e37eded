// SPDX-License-Identifier: Apache-2.0
//! The device of an engine that runs ahead: the text that each pass feeds from, and its writes.

use crate::check::names::in_flight::{Node, Output, Pending, Texts, Unreported};
use crate::oracle::contents::Ghost;
use crate::oracle::prefixes::{Numbers, Prefixes};
use crate::oracle::schedule::Schedule;
use crate::oracle::schedule::writes::Write;
use crate::types::ids::Row;
use crate::types::violation::Violation;

/// The end of a batch: the load that fails, and what each of its writes samples.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ending {
    pub(crate) failing: Option<Unreported>,
    /// The drafts that are accepted, and one token more; empty if nothing awaits it.
    pub(crate) sampled: Vec<Numbers>,
}

/// The text that a pass feeds from. known: the last token was the last to be sampled.
pub(crate) struct DeviceTokens {
    pub(crate) tokens: Numbers,
    pub(crate) known: bool,
}

/// The passes of batches on the device: where the texts of their requests end meanwhile.
pub(crate) struct Device {
    texts: Vec<(Row, DeviceTokens)>,
}

impl Device {
    /// Return the texts on the device, if a batch is to run; their requests may have left.
    pub(crate) fn recall(node: &Node, batch: Option<&Pending>) -> Self {
        let mut device = Device { texts: Vec::new() };
        device.feed(&node.texts);
        batch.inspect(|batch| device.feed(&batch.feeds));
        device
    }

    /// Add the texts of other requests.
    pub(crate) fn feed(&mut self, texts: &Texts) {
        for (row, tokens) in texts {
            self.put(*row, DeviceTokens { tokens: tokens.clone(), known: true });
        }
    }

    fn put(&mut self, row: Row, text: DeviceTokens) {
        self.texts.retain(|each| each.0 != row);
        self.texts.push((row, text));
    }

    /// Return the text that a pass feeds from: the engine's tokens, or the device's.
    pub(crate) fn text_of(&self, tokens: &[u32], write: &Write) -> DeviceTokens {
        let given = |known| DeviceTokens { tokens: Numbers::from_slice(tokens), known };
        if (write.start as usize) < tokens.len() {
            return given(true);
        }
        let found = self.texts.iter().find(|each| each.0 == write.row);
        found.map_or_else(
            || given(false),
            |(_, text)| DeviceTokens { tokens: text.tokens.clone(), known: text.known },
        )
    }

    /// Return the texts that are known.
    pub(crate) fn texts(&self) -> Texts {
        let known = self.texts.iter().filter(|each| each.1.known);
        known.map(|(row, text)| (*row, text.tokens.clone())).collect()
    }

    /// Play the forward pass of a batch on a ghost; tokens: those of its requests as taken.
    /// epoch_of: in which each of them began.
    pub(crate) fn forward(
        &mut self,
        (writes, tokens): (&[Write], &Texts),
        epoch_of: impl Fn(Row) -> u32,
        sampled: &[Numbers],
        (ghost, schedule, prefixes): (&mut Ghost, &Schedule, &mut Prefixes),
    ) -> Result<(), Violation> {
        let mut passes = Vec::new();
        for (at, write) in writes.iter().enumerate() {
            let tokens = tokens_of(tokens, write.row);
            let mut text = self.text_of(tokens, write);
            let added = sampled.get(at).map_or(&[][..], |added| added);
            passes.push(pass_of(tokens.len() as u32, write, &text, added.len() as u32));
            text.tokens.extend_from_slice(added);
            let numbers = prefixes.number_in(&text.tokens, epoch_of(write.row));
            ghost.set_numbers(write.row, numbers);
            if write.end as usize >= tokens.len() {
                self.put(write.row, DeviceTokens { tokens: text.tokens, known: !added.is_empty() });
            }
        }
        ghost.forward_numbered(&passes, schedule)
    }
}

/// Return the tokens of a row.
pub(crate) fn tokens_of(texts: &Texts, row: Row) -> &[u32] {
    texts.iter().find(|each| each.0 == row).map_or(&[][..], |each| &each.1)
}

/// Return the pass of a write on the device; drafts that were not accepted are undefined.
fn pass_of(num_taken: u32, write: &Write, text: &DeviceTokens, num_sampled: u32) -> Write {
    let (known, count) = (text.tokens.len() as u32, write.end - write.start);
    let (mut start, mut loaded, mut stop) = (write.start, write.loaded, write.end);
    let ahead = write.start >= num_taken;
    if ahead {
        start = if text.known { known - 1 } else { known };
        loaded = start;
        stop = if text.known { start + count } else { write.end };
    }
    let end = stop.min(known) + num_sampled.saturating_sub(1);
    let num_slots = stop + write.num_slots - write.end;
    Write { start, loaded, end, num_slots, num_rejected: stop - end, ahead, ..*write }
}

/// Return the outputs that can be handed in: the first of each request, once its batch was
/// executed.
pub(crate) fn oldest(outputs: &[Output]) -> impl Iterator<Item = &Output> {
    let is_first = |at: usize, row| outputs[..at].iter().all(|each| each.row != row);
    let first = outputs.iter().enumerate().filter(move |(at, each)| is_first(*at, each.row));
    first.map(|each| each.1).filter(|output| !output.text.is_empty())
}
