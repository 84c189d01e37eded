// SPDX-License-Identifier: Apache-2.0
//! A path: the calls of a move so far, and why a walk along it ends.

use crate::check::search::actions::Move;
use crate::check::search::report::MoveNames;
use crate::oracle::calls::Call;
use crate::oracle::schedule::Schedule;
use crate::state::state::{Operation, State};
use crate::types::clone_in_place::clone_in_place;
use crate::types::ids::Row;
use crate::types::violation::Violation;

/// A request whose load fails, and the first token that it does not bring.
pub(crate) type Failing = Option<(Row, u32)>;
/// How an edge ends: what fails, and the move that is made before the report.
pub(crate) type Ending<'a> = (Failing, Option<&'a Move>);

/// Some moves that were made.
#[derive(Debug)]
pub(crate) struct Path {
    pub(crate) state: State,
    pub(crate) schedule: Schedule,
    pub(crate) names: MoveNames,
    pub(crate) calls: Vec<Call>,
    pub(crate) changed: bool,
}

impl Path {
    /// No move was made yet.
    pub(crate) fn new(state: State, schedule: Schedule) -> Self {
        Path { state, schedule, names: MoveNames::new(), calls: Vec::new(), changed: false }
    }
}

clone_in_place!(Path { state, schedule, names, calls, changed });

/// Why an edge is not followed further.
pub(crate) enum Stop {
    Broken(Violation),
    /// Who asked has what it wanted.
    Found,
}

impl From<Violation> for Stop {
    fn from(violation: Violation) -> Self {
        Stop::Broken(violation)
    }
}

/// Each request whose external tokens a path loads, with each token that may be the first to be
/// missing: of the call itself, or of a block that an operation loads.
pub(crate) fn failures(path: &Path) -> Vec<(Row, u32)> {
    let of = |each: &Operation| each.request.map(|row| (row, each.first_token));
    let operations = path.state.operations.values().filter_map(of);
    let loads = path.schedule.loads();
    let writes =
        loads.flat_map(|write| (write.start..write.loaded).map(|first| (write.row, first)));
    operations.chain(writes).collect()
}
