// SPDX-License-Identifier: Apache-2.0
//! The methods `allocate_slots` and `can_allocate`, with the same arguments, and `load`.

use pyo3::prelude::*;

use crate::bindings::arguments::{CountArg, FlagArg, HitArg, IdArg};
use crate::bindings::errors::Given;
use crate::bindings::manager::Manager;
use crate::bindings::values;
use crate::bindings::values::{PyAdmitted, PyTaken, PyVerdict};
use crate::record::calls::{ALLOCATE_SLOTS, Argument, Call, LOAD, Options};
use crate::state::state::State;
use crate::transitions::allocate::{allocate_slots, can_allocate};
use crate::transitions::queries::checkpoint_stop;
use crate::transitions::transfers::load;
use crate::types::slot_request::SlotRequest;

/// A method with the arguments of an allocation: the body gets them read, with the request's id.
macro_rules! slot_method {
    (
        $(#[$doc:meta])*
        fn $method:ident(
            $slf:ident, $given:ident = $new:expr, $id:ident, $slot_request:ident
        ) -> $value:ty
        $body:block
    ) => {
        #[pymethods]
        impl Manager {
            $(#[$doc])*
            #[pyo3(signature = (
                request_id, num_new_tokens, hit, /, *, num_lookahead_tokens,
                num_external_computed_tokens, num_encoder_tokens, reserved_blocks,
                num_output_placeholders, delay_cache_blocks, full_sequence_must_fit, checkpoint
            ))]
            #[allow(clippy::too_many_arguments)] // those of the transition
            fn $method<'py>(
                $slf: &Bound<'py, Self>,
                request_id: IdArg<'_, 'py>,
                num_new_tokens: CountArg<'_, 'py>,
                hit: HitArg<'_, 'py>,
                num_lookahead_tokens: CountArg<'_, 'py>,
                num_external_computed_tokens: CountArg<'_, 'py>,
                num_encoder_tokens: CountArg<'_, 'py>,
                reserved_blocks: CountArg<'_, 'py>,
                num_output_placeholders: CountArg<'_, 'py>,
                delay_cache_blocks: FlagArg<'_, 'py>,
                full_sequence_must_fit: FlagArg<'_, 'py>,
                checkpoint: FlagArg<'_, 'py>,
            ) -> PyResult<$value> {
                let mut $given = $new;
                let $id = $given.name(request_id.0);
                let $slot_request = SlotRequest {
                    num_new_tokens: $given.count(num_new_tokens)?,
                    hit: $given.hit(hit)?,
                    num_lookahead_tokens: $given.count(num_lookahead_tokens)?,
                    num_external_computed_tokens: $given.count(num_external_computed_tokens)?,
                    num_encoder_tokens: $given.count(num_encoder_tokens)?,
                    reserved_blocks: $given.count(reserved_blocks)?,
                    num_output_placeholders: $given.count(num_output_placeholders)?,
                    delay_cache_blocks: $given.flag("delay_cache_blocks", delay_cache_blocks)?,
                    full_sequence_must_fit: $given
                        .flag("full_sequence_must_fit", full_sequence_must_fit)?,
                    checkpoint: $given.flag("checkpoint", checkpoint)?,
                    loads: false,
                };
                $body
            }
        }
    };
}

slot_method! {
    /// Schedule the next tokens of a request; returns the blocks that its tables grew by.
    fn allocate_slots(slf, given = Given::of(slf), id, slot_request) -> PyAdmitted<'py> {
        let fields = [Argument::Request(id), Argument::Number(slot_request.num_new_tokens)];
        let options = Options::Slots(&slot_request);
        let call = Call::new(ALLOCATE_SLOTS, &fields).with(options);
        let run = |state: &mut State| allocate_slots(state, id, &slot_request);
        let taken = Self::change(slf, &given, call, run)?;
        values::admitted(slf.py(), &taken, Self::grown_none(slf)?)
    }
}

slot_method! {
    /// What `allocate_slots` would say to the same arguments. Changes nothing.
    fn can_allocate(slf, given = Given::default(), id, slot_request) -> PyVerdict<'py> {
        let verdict = Self::query(slf, &given, |state| can_allocate(state, id, &slot_request))?;
        values::verdict(slf.py(), verdict)
    }
}

#[pymethods]
impl Manager {
    /// Where to end a step so that its state is worth keeping. Changes nothing.
    #[pyo3(signature = (request_id, num_new_tokens, hit, /))]
    fn checkpoint_stop<'py>(
        slf: &Bound<'py, Self>,
        request_id: IdArg<'_, 'py>,
        num_new_tokens: CountArg<'_, 'py>,
        hit: HitArg<'_, 'py>,
    ) -> PyResult<(i64, bool)> {
        let mut given = Given::default();
        let id = given.name(request_id.0);
        let num_new_tokens = given.count(num_new_tokens)?;
        let mut field = |name| given.count(CountArg(hit.0.getattr(name)?.as_borrowed()));
        let hit = match hit.0.is_none() {
            true => None,
            false => Some((field("num_tokens")?, field("num_common")?)),
        };
        Self::query(slf, &given, |state| checkpoint_stop(state, id, num_new_tokens, hit))
    }

    /// Fill slots for the next tokens of a request from the external store.
    #[pyo3(signature = (
        request_id, num_tokens, hit, /, *, reserved_blocks, full_sequence_must_fit
    ))]
    fn load<'py>(
        slf: &Bound<'py, Self>,
        request_id: IdArg<'_, 'py>,
        num_tokens: CountArg<'_, 'py>,
        hit: HitArg<'_, 'py>,
        reserved_blocks: CountArg<'_, 'py>,
        full_sequence_must_fit: FlagArg<'_, 'py>,
    ) -> PyResult<PyTaken<'py>> {
        let mut given = Given::of(slf);
        let name = given.name(request_id.0);
        let slot_request = SlotRequest {
            num_external_computed_tokens: given.count(num_tokens)?,
            hit: given.hit(hit)?,
            reserved_blocks: given.count(reserved_blocks)?,
            full_sequence_must_fit: given.flag("full_sequence_must_fit", full_sequence_must_fit)?,
            ..SlotRequest::default()
        };
        let count = slot_request.num_external_computed_tokens;
        let fields = [Argument::Request(name), Argument::Number(count)];
        let options = [
            slot_request.hit.as_ref().map(Argument::Hit),
            Argument::count(slot_request.reserved_blocks),
            Argument::flag(slot_request.full_sequence_must_fit),
        ];
        let call = Call::new(LOAD, &fields).with(Options::Given(&options));
        let outcome = Self::change(slf, &given, call, |state| load(state, name, &slot_request))?;
        values::taken(slf.py(), outcome)
    }
}
