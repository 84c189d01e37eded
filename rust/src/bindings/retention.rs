// SPDX-License-Identifier: Apache-2.0
//! The methods of a manager that determine how long content stays cached.

use pyo3::prelude::*;

use crate::bindings::arguments::{CountArg, IdArg, RetentionArg, pieces};
use crate::bindings::errors::Given;
use crate::bindings::manager::Manager;
use crate::record::calls;
use crate::record::calls::{Argument, Call};
use crate::transitions::pins::{pin_prefix, unpin_prefix};
use crate::transitions::retention::{extend_retention, tick};

#[pymethods]
impl Manager {
    /// Say the time in ms: levels whose duration is over end.
    #[pyo3(signature = (now_ms))]
    fn tick<'py>(slf: &Bound<'py, Self>, now_ms: CountArg<'_, 'py>) -> PyResult<()> {
        Self::change_number(slf, calls::TICK, now_ms, tick)
    }

    /// Join more wishes to those of a request, for the blocks that it releases from now on.
    #[pyo3(signature = (request_id, retention, /))]
    fn extend_retention<'py>(
        slf: &Bound<'py, Self>,
        request_id: IdArg<'_, 'py>,
        retention: RetentionArg<'_, 'py>,
    ) -> PyResult<()> {
        let (mut given, pieces) = (Given::of(slf), pieces(retention)?);
        let name = given.name(request_id.0);
        let fields = [Argument::Request(name), Argument::Retention(&pieces)];
        let call = Call::new(calls::EXTEND_RETENTION, &fields);
        Self::change(slf, &given, call, |state| extend_retention(state, name, &pieces))
    }

    /// Hold what a hit on a request's first tokens needs, until `unpin_prefix`; returns the tokens
    /// that are covered.
    #[pyo3(signature = (name, request_id, num_tokens))]
    fn pin_prefix<'py>(
        slf: &Bound<'py, Self>,
        name: IdArg<'_, 'py>,
        request_id: IdArg<'_, 'py>,
        num_tokens: CountArg<'_, 'py>,
    ) -> PyResult<u32> {
        let mut given = Given::of(slf);
        let (name, id) = (given.name(name.0), given.name(request_id.0));
        let count = given.count(num_tokens)?;
        let fields = [Argument::Pin(name), Argument::Request(id), Argument::Number(count)];
        let call = Call::new(calls::PIN_PREFIX, &fields);
        Self::change(slf, &given, call, |state| pin_prefix(state, name, id, count))
    }

    /// Let go of what a pin holds.
    #[pyo3(signature = (name))]
    fn unpin_prefix<'py>(slf: &Bound<'py, Self>, name: IdArg<'_, 'py>) -> PyResult<()> {
        let mut given = Given::of(slf);
        let name = given.name(name.0);
        let fields = [Argument::Pin(name)];
        let call = Call::new(calls::UNPIN_PREFIX, &fields);
        Self::change(slf, &given, call, |state| unpin_prefix(state, name))
    }
}
