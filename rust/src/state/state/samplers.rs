// SPDX-License-Identifier: Apache-2.0
//! The batches whose output a request awaits.
//!
//! Invariants: ends ascend, none is below the request's tokens, and the last one is the count of a
//! request that counts all its tokens. Batch `output_from` alone is not recorded if it computed
//! such a request up to its last token, which is the usual case: that costs nothing.
//! Part of kvcore/state/state.py.

use smallvec::smallvec;

use crate::state::batch_records::{Sampler, Samplers};
use crate::state::state::RequestState;

impl RequestState {
    /// The batches whose output is to come, oldest first: those that compute the positions from
    /// which the tokens after the known ones are sampled.
    pub(crate) fn awaited(&self) -> Samplers {
        if !self.samplers.is_empty() || self.num_computed < self.num_tokens() {
            return self.samplers.clone();
        }
        smallvec![Sampler { batch: self.output_from, end: self.num_computed }]
    }

    /// Those of them before a batch.
    pub(crate) fn awaited_before(&self, number: u64) -> Samplers {
        let mut awaited = self.awaited();
        awaited.retain(|each| each.batch < number);
        awaited
    }

    /// Whether the output of this batch is the next one for a request that counts all its tokens.
    #[inline(always)] // of each request in each step
    pub(crate) fn awaits_next(&self, batch: u64) -> bool {
        match &self.samplers[..] {
            [oldest, ..] => oldest.batch == batch && self.output_from <= batch,
            [] => self.output_from == batch,
        }
    }

    /// Await these batches, as far as they sample what is not known.
    pub(crate) fn set_awaited(&mut self, samplers: &[Sampler]) {
        let (num_tokens, count) = (self.num_tokens(), self.num_computed);
        let (to_come, from) = (self.num_output_placeholders(), self.output_from);
        let made = &mut self.samplers;
        made.clear();
        for &Sampler { batch, end } in samplers {
            let end = if count < num_tokens { end } else { end.min(count) };
            if end < num_tokens || made.last().is_some_and(|last| end <= last.end) {
                continue;
            }
            if made.last().is_some_and(|last| last.batch == batch) {
                made.pop();
            }
            made.push(Sampler { batch, end });
        }
        if to_come == 0 && made[..] == [Sampler { batch: from, end: count }] {
            made.clear();
        }
        if to_come == 0 && !made.is_empty() {
            self.quiet_until = 0;
        }
    }

    /// Await what is awaited as far as it still can be, after a change.
    pub(crate) fn settle_awaited(&mut self) {
        if !self.samplers.is_empty() {
            self.set_awaited(&self.samplers.clone());
        }
    }

    /// Await what older batches sample, after the request left the open batch and its count fell.
    ///
    /// open: the open batch. before: the count before.
    pub(crate) fn await_older(&mut self, open: u64, before: u32) {
        if !self.samplers.is_empty() {
            self.set_awaited(&self.awaited_before(open));
            return;
        }
        let (num_tokens, batch) = (self.num_tokens(), self.output_from);
        if before >= num_tokens && self.num_computed < num_tokens && batch < open {
            self.samplers.push(Sampler { batch, end: before });
        }
    }

    /// Note that the open batch computes one position more of a request that counts all its tokens.
    #[inline(always)] // of each request in each step
    pub(crate) fn await_next(&mut self, open: u64) {
        let (num_tokens, next) = (self.num_tokens(), self.num_computed + 1);
        match &mut self.samplers[..] {
            [oldest, last] if oldest.end < num_tokens => {
                *oldest = std::mem::replace(last, Sampler { batch: open, end: next });
            }
            [] if self.output_from < open => self.await_first(open, next),
            _ => self.await_up_to(open, next),
        }
    }

    /// The same of a request that awaits only the output of an older batch, which is not recorded.
    #[inline(never)]
    fn await_first(&mut self, open: u64, end: u32) {
        let older = Sampler { batch: self.output_from, end: self.num_computed };
        self.samplers = smallvec![older, Sampler { batch: open, end }];
    }

    /// The same of positions up to a count.
    #[cold]
    #[inline(never)]
    pub(crate) fn await_up_to(&mut self, open: u64, end: u32) {
        if self.samplers.is_empty() {
            self.samplers.push(Sampler { batch: self.output_from, end: self.num_computed });
        }
        let num_tokens = self.num_tokens();
        self.samplers.retain(|each| each.end >= num_tokens && each.batch < open);
        self.samplers.push(Sampler { batch: open, end });
    }

    /// Count the positions that the open batch schedules up to a count, and await its output.
    pub(crate) fn schedule(&mut self, open: u64, count: u32) {
        let is_late = self.num_computed < self.num_tokens();
        if is_late {
            self.samplers.clear();
            self.num_computed = count;
            if self.num_output_placeholders() > 0 {
                self.samplers.push(Sampler { batch: open, end: count });
            }
        } else {
            self.await_up_to(open, count);
            self.num_computed = count;
            if self.num_output_placeholders() == 0 {
                self.settle_awaited();
            }
        }
    }

    /// Put all output so far out of date, with no batch for the next token.
    ///
    /// Batch 0 stands for none: it is older than the open one.
    pub(crate) fn await_none(&mut self, open: u64) {
        let end = self.num_computed;
        self.output_from = open;
        self.samplers.clear();
        if end >= self.num_tokens() {
            self.samplers.push(Sampler { batch: 0, end });
        }
    }
}
