// SPDX-License-Identifier: Apache-2.0
//! A path: the calls of some moves; and a walk along the edges of a node, which may end early.
//!
//! A part of core_model.rs and flight_model.rs: what makes a model of the search out of either.

use crate::check::properties::checker::shown;
use crate::check::search::actions::Move;
use crate::check::search::report::{MoveNames, Notes};
use crate::check::world::model::{Broken, Edge, Fingerprint, Model, Sink};
use crate::oracle::calls::Call;
use crate::oracle::schedule::Schedule;
use crate::state::state::{Operation, State};
use crate::types::clone_in_place::clone_in_place;
use crate::types::ids::Row;
use crate::types::violation::Violation;

/// A request whose load fails, and the first token that is not loaded.
pub(crate) type Failing = Option<(Row, u32)>;
/// The end of an edge: what fails, and the move that is made before the report.
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
    /// Begin a path without moves.
    pub(crate) fn new(state: State, schedule: Schedule) -> Self {
        Path { state, schedule, names: MoveNames::new(), calls: Vec::new(), changed: false }
    }

    /// Forget the moves.
    pub(crate) fn begin(&mut self) {
        self.names.clear();
        self.calls.clear();
        self.changed = false;
    }
}

clone_in_place!(Path { state, schedule, names, calls, changed });

/// Why an edge is not followed further.
pub(crate) enum Stop {
    Broken(Violation),
    /// The visitor has found what it looked for.
    Found,
}

impl From<Violation> for Stop {
    fn from(violation: Violation) -> Self {
        Stop::Broken(violation)
    }
}

/// Return each request whose external tokens a path loads, with each token that may be the first to
/// be missing: of the call itself, or of a block that an operation loads.
pub(crate) fn failures(path: &Path) -> Vec<(Row, u32)> {
    let of = |each: &Operation| each.request.map(|row| (row, each.first_token));
    let operations = path.state.operations.values().filter_map(of);
    let loads = path.schedule.loads();
    let writes =
        loads.flat_map(|write| (write.start..write.loaded).map(|first| (write.row, first)));
    operations.chain(writes).collect()
}

/// A visitor of edges: gets their numbers, and the node that each leads to.
pub(crate) type Visit<'v, W> =
    dyn for<'n> FnMut(&mut W, u32, <W as Walk>::Node<'n>) -> Result<(), Stop> + 'v;

/// A model whose edges are walked.
pub(crate) trait Walk: Send + Sized {
    /// A node, as the visitors get it.
    type Node<'n>;

    /// Return the notes, whether the calls are kept, and the calls.
    fn record(&mut self) -> (&mut Notes, &mut bool, &mut Vec<Call>);

    /// Return a state that holds nothing.
    fn empty(&self) -> State;

    /// Return the first node; empty: a state that holds nothing.
    fn first<'n>(&self, empty: &'n State) -> Self::Node<'n>;

    /// Return the state of a node.
    fn state<'a>(node: &'a Self::Node<'_>) -> &'a State;

    /// Walk the edges of a packed node; what panics is a violation, too.
    fn walk(&mut self, packed: &[u8], visit: &mut Visit<'_, Self>) -> Result<(), Stop>;

    /// Return the fingerprint of a node.
    fn fingerprint(&mut self, node: &Self::Node<'_>) -> Result<Fingerprint, Violation>;

    /// Check a node that is new.
    fn check(&mut self, node: &Self::Node<'_>) -> Result<(), Violation>;

    /// Return the node as bytes.
    fn pack(&mut self, node: Self::Node<'_>) -> Vec<u8>;

    /// Use the room of a node that is not kept again.
    fn reuse(&mut self, _node: Self::Node<'_>) {}
}

/// Walk again with the calls kept, without counting; return the calls up to the end of the walk.
fn recorded<W: Walk>(
    model: &mut W,
    packed: &[u8],
    visit: &mut Visit<'_, W>,
) -> (Result<(), Stop>, Vec<Call>) {
    let (counted, recording, _) = model.record();
    let before = counted.clone();
    *recording = true;
    let walked = model.walk(packed, visit);
    let (counted, recording, calls) = model.record();
    *recording = false;
    *counted = before;
    (walked, std::mem::take(calls))
}

impl<W: Walk> Model for W {
    fn start(&mut self) -> Result<(Fingerprint, Vec<u8>), Broken> {
        let broken = |violation| Broken { violation, calls: Vec::new() };
        let empty = self.empty();
        let node = self.first(&empty);
        self.check(&node).map_err(broken)?;
        let name = self.fingerprint(&node).map_err(broken)?;
        Ok((name, self.pack(node)))
    }

    fn edges(&mut self, node: &[u8], notes: &mut Notes, sink: &mut dyn Sink) -> Result<(), Broken> {
        std::mem::swap(self.record().0, notes);
        let walked = self.walk(node, &mut |model, number, reached| {
            let name = model.fingerprint(&reached)?;
            if sink.is_new(name) {
                model.check(&reached)?;
                let shown = shown(W::state(&reached));
                sink.keep(Edge { number, name }, shown, &model.pack(reached));
            } else {
                model.reuse(reached);
            }
            Ok(())
        });
        std::mem::swap(self.record().0, notes);
        let Err(Stop::Broken(violation)) = walked else {
            return Ok(());
        };
        let (again, calls) = recorded(self, node, &mut |model, _, reached| {
            model.fingerprint(&reached)?;
            Ok(model.check(&reached)?)
        });
        match again {
            Err(Stop::Broken(violation)) => Err(Broken { violation, calls }),
            _ => Err(Broken { violation, calls: Vec::new() }),
        }
    }

    fn follow(&mut self, node: &[u8], edge: u32) -> Option<(Vec<Call>, Vec<u8>)> {
        let mut reached = None;
        let (_, calls) = recorded(self, node, &mut |model, number, node| {
            if number < edge {
                return Ok(());
            }
            reached = Some(model.pack(node));
            Err(Stop::Found)
        });
        reached.map(|reached| (calls, reached))
    }
}
