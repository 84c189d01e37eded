// SPDX-License-Identifier: Apache-2.0
//! Output under the number of another batch, which the core must refuse.
//!
//! Twin: kvcore/check/search/other_output.py.

use std::collections::BTreeSet;

use crate::check::names::in_flight::Output;
use crate::state::state::State;
use crate::transitions::output::check_output;

/// Return the other batches under whose number a token would be taken in place of an output.
///
/// Tried are the batches of all outputs to come, and the last one taken.
pub(crate) fn taken_instead(state: &State, output: &Output, outputs: &[Output]) -> BTreeSet<u64> {
    let numbers = outputs.iter().map(|each| each.batch).chain([state.batch.number - 1]);
    let others = numbers.filter(|&number| number != output.batch);
    let is_taken = |number: &u64| check_output(state, output.row, Some(*number as i64)).is_ok();
    others.filter(is_taken).collect()
}
