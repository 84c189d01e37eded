// SPDX-License-Identifier: Apache-2.0
//! The methods of a manager that say how long content stays cached.

use pyo3::prelude::*;

use crate::bindings::arguments::{CountArg, IdArg, RetentionArg, pieces};
use crate::bindings::errors::Given;
use crate::bindings::manager::Manager;
use crate::record::calls;
use crate::record::calls::Call;
use crate::transitions::retention::{extend_retention, tick};

#[pymethods]
impl Manager {
    /// Say the time in ms: levels whose duration is over end.
    #[pyo3(signature = (now_ms))]
    fn tick<'py>(slf: &Bound<'py, Self>, now_ms: CountArg<'_, 'py>) -> PyResult<()> {
        let mut given = Given::default();
        let now_ms = given.count(now_ms)?;
        Self::change(slf, &given, Call::Number(calls::TICK, now_ms), |state| tick(state, now_ms))
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
        let call = Call::ExtendRetention(name, &pieces);
        Self::change(slf, &given, call, |state| extend_retention(state, name, &pieces))
    }
}
