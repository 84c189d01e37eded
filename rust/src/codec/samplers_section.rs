// SPDX-License-Identifier: Apache-2.0
//! The section of the batches whose output is to come, which is rare.
//!
//! Twin: kvcore/codec/samplers_section.py.

use crate::state::batch_records::Sampler;
use crate::state::state::State;
use crate::types::errors::Error;
use crate::types::ids::Row;
use crate::types::wire::{Reader, Writer};

/// Whether it is recorded of any request whose output is to come.
pub(crate) fn has_samplers(state: &State) -> bool {
    with_samplers(state).next().is_some()
}

/// Write the batches whose output is to come, with their ends, by request in row order.
pub(crate) fn write_samplers(out: &mut Writer, state: &State) {
    out.count(with_samplers(state).count());
    for (row, samplers) in with_samplers(state) {
        out.u32(row);
        out.count(samplers.len());
        for each in samplers {
            out.u64(each.batch);
            out.u32(each.end);
        }
    }
}

/// Read whose output is to come of the next bytes. Fails with DamagedState.
pub(crate) fn read_samplers(source: &mut Reader<'_>, state: &mut State) -> Result<(), Error> {
    let mut next = 0;
    for _ in 0..source.u32()? {
        let row = source.u32()?;
        let read =
            |source: &mut Reader<'_>| Ok(Sampler { batch: source.u64()?, end: source.u32()? });
        let samplers = source.list(read)?;
        let is_known = row >= next && matches!(state.requests.get(row as usize), Some(Some(_)));
        if !is_known || samplers.is_empty() {
            return Err(source.damaged("batches sample for no request, or none for one"));
        }
        next = row + 1;
        let (request, last) = (&mut state[Row(row)], samplers[samplers.len() - 1]);
        request.set_awaited(&samplers);
        let falls_short =
            last.end < request.num_computed && request.num_computed >= request.num_tokens();
        let rises = samplers.is_sorted_by(|one, next| one.batch < next.batch);
        let fits = request.samplers[..] == samplers && rises && !falls_short;
        if !fits || last.batch > state.batch.number {
            return Err(source.damaged("whose output is to come is not in canonical form"));
        }
    }
    if next == 0 {
        return Err(source.damaged("a section is empty"));
    }
    Ok(())
}

/// Return the requests whose output to come is recorded, in row order.
fn with_samplers(state: &State) -> impl Iterator<Item = (u32, &[Sampler])> {
    let known = (0..).zip(&state.requests).filter_map(|(row, each)| Some((row, each.as_ref()?)));
    let samplers = known.map(|(row, request)| (row, &request.samplers[..]));
    samplers.filter(|(_, samplers)| !samplers.is_empty())
}
