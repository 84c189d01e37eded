// SPDX-License-Identifier: Apache-2.0
//! The methods of a manager that say how long content stays cached.

use pyo3::prelude::*;

use crate::bindings::arguments::{CountArg, IdArg, RetentionArg, pieces};
use crate::bindings::errors::Given;
use crate::bindings::manager::Manager;
use crate::record::calls;
use crate::record::calls::{Argument, Call};
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
        let (mut given, pieces) = (Given::default(), pieces(retention)?);
        let name = given.name(request_id.0);
        let fields = [Argument::Request(name), Argument::Retention(&pieces)];
        let call = Call::new(calls::EXTEND_RETENTION, &fields);
        Self::change(slf, &given, call, |state| extend_retention(state, name, &pieces))
    }
}
