// SPDX-License-Identifier: Apache-2.0
//! The arguments of `allocate_slots`, `can_allocate` and `load` in the twin's form.

use pyo3::prelude::*;

use crate::bindings::arguments::{CountArg, FlagArg, HitArg, flag};
use crate::bindings::errors::Given;
use crate::transitions::slot_request::SlotRequest;

impl<'py> Given<'py> {
    /// An allocation: its new, lookahead, external and encoder tokens, its hit, whether its caching
    /// is delayed and whether the full sequence must fit, how many blocks stay reserved, and how
    /// many tokens are to come.
    pub(crate) fn slot_request(
        &mut self,
        [new, lookahead, external, encoder]: [CountArg<'_, 'py>; 4],
        hit: HitArg<'_, 'py>,
        [delay, full]: [FlagArg<'_, 'py>; 2],
        [reserved, to_come]: [CountArg<'_, 'py>; 2],
    ) -> PyResult<SlotRequest> {
        Ok(SlotRequest {
            num_new_tokens: self.count(new)?,
            hit: self.hit(hit)?,
            num_lookahead_tokens: self.count(lookahead)?,
            num_external_computed_tokens: self.count(external)?,
            delay_cache_blocks: flag("delay_cache_blocks", delay)?,
            num_encoder_tokens: self.count(encoder)?,
            full_sequence_must_fit: flag("full_sequence_must_fit", full)?,
            reserved_blocks: self.count(reserved)?,
            num_output_placeholders: self.count(to_come)?,
            loads: false,
        })
    }

    /// A load: its tokens, its hit, whether the full sequence must fit, and how many blocks stay
    /// reserved.
    pub(crate) fn loading(
        &mut self,
        num_tokens: CountArg<'_, 'py>,
        hit: HitArg<'_, 'py>,
        full: FlagArg<'_, 'py>,
        reserved: CountArg<'_, 'py>,
    ) -> PyResult<SlotRequest> {
        Ok(SlotRequest {
            num_external_computed_tokens: self.count(num_tokens)?,
            hit: self.hit(hit)?,
            full_sequence_must_fit: flag("full_sequence_must_fit", full)?,
            reserved_blocks: self.count(reserved)?,
            ..SlotRequest::default()
        })
    }
}
