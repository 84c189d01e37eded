// SPDX-License-Identifier: Apache-2.0
//! The core as a model: every edge of a world in which a taken batch counts as executed.
//!
//! The calls are the core's own, there is no second model. An edge is one step of an engine: one
//! move, or as many as `moves_per_batch`, then `take_batch` until nothing is left to run. On every
//! edge the invariants are checked at each call, and the contents: from blocks that hold just what
//! a state counts on, the edge's commands and writes must give all that the next one counts on. So
//! the ghost adds no states; what it holds at first is found once for all edges of a state. If
//! loads fail, an edge that loads ends in every way it can: the loader reports the failure at once,
//! or after any one move, while the load is unconfirmed. If the loader is gone, a request that
//! counted its tokens reports it; if none is left, nothing may rest on the load any more
//! (LOAD-FAILED). An edge ends with its loads confirmed. Twin: kvcore/check/search/core_model.py.

pub(crate) mod closing;
pub(crate) mod path;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::check::names::canonical::Namer;
use crate::check::names::fingerprints::Keys;
use crate::check::names::packed::{pack, unpack};
use crate::check::properties::checker::Checker;
use crate::check::search::actions::{Children, Move, known_children};
use crate::check::search::core_model::path::{Ending, Path, Stop, Visit, Walk, failures};
use crate::check::search::moves::moves;
use crate::check::search::report::Notes;
use crate::check::world::calls::Outcome;
use crate::check::world::model::{Findings, Fingerprint};
use crate::check::world::world::{Symmetry, World};
use crate::codec::encode::encode;
use crate::oracle::calls::{Call, Value};
use crate::oracle::contents::Ghost;
use crate::oracle::prefixes::Prefixes;
use crate::oracle::schedule::Schedule;
use crate::oracle::schedule::writes::Write;
use crate::state::state::{State, make_state};
use crate::types::errors::Error;
use crate::types::violation::{Checks, Violation};

/// The states of a world without batches in flight, for one worker.
pub struct CoreModel {
    pub(crate) world: Arc<World>,
    pub(crate) empty: State,
    pub(crate) symmetry: Symmetry,
    pub(crate) keys: Keys,
    pub(crate) checker: Checker,
    pub(crate) prefixes: Prefixes,
    pub(crate) namer: Namer,
    /// What the expanded state counts on, and what an edge makes of it.
    pub(crate) base: Ghost,
    pub(crate) ghost: Ghost,
    pub(crate) assumed: Result<(), Violation>,
    pub(crate) moves: Vec<Move>,
    /// Paths that are done with.
    #[expect(clippy::vec_box)] // a path is moved without its bytes
    pub(crate) spare: Vec<Box<Path>>,
    pub(crate) writes: Vec<Write>,
    /// Whether calls are kept for a story.
    pub(crate) recording: bool,
    /// The calls of the edge that is being made, if they are kept.
    pub(crate) calls: Vec<Call>,
    num_edges: u32,
}

impl CoreModel {
    /// Return the model of a world for one worker; a clone of its prefixes makes that of the next
    /// one. Fails with InvalidConfig.
    pub fn new(
        world: Arc<World>,
        symmetry: Symmetry,
        keys: Keys,
        checks: Checks,
        prefixes: Prefixes,
    ) -> Result<Self, Error> {
        Ok(CoreModel {
            empty: make_state(world.config.clone())?,
            symmetry,
            keys,
            prefixes,
            namer: Namer::new(symmetry),
            base: Ghost::checking(&world.config, &checks),
            ghost: Ghost::checking(&world.config, &checks),
            checker: Checker::new(checks),
            assumed: Ok(()),
            moves: Vec::new(),
            spare: Vec::new(),
            writes: Vec::new(),
            recording: false,
            calls: Vec::new(),
            num_edges: 0,
            world,
        })
    }

    /// Visit every path behind one without moves, with every way in which its loads can end; note
    /// what the visitor makes of it.
    fn walk_from(&mut self, root: &Path, visit: &mut Visit<'_, CoreModel>) -> Result<(), Stop> {
        self.num_edges = 0;
        self.calls.clear();
        self.assumed = self.base.assume(&root.state, &root.schedule, &mut self.prefixes);
        let mut paths = Vec::new();
        for left in (0..self.world.moves_per_batch).rev() {
            let mut longer = Vec::new();
            let first = (left + 1 == self.world.moves_per_batch).then_some(root);
            for path in first.into_iter().chain(paths.iter().map(Box::as_ref)) {
                self.calls.clone_from(&path.calls);
                let found = self.possible(&path.state);
                let Some(found) = self.run_guarded(found)? else { continue };
                for each in &found {
                    self.calls.clone_from(&path.calls);
                    let made = self.make(each, path);
                    let Some(made) = self.run_guarded(made)? else { continue };
                    longer.extend(self.end_path(&root.state, made, left > 0, visit)?);
                }
                self.moves = found;
            }
            self.spare.append(&mut paths);
            paths = longer;
        }
        self.spare.append(&mut paths);
        Ok(())
    }

    /// Return the path of no move behind a state.
    pub(crate) fn path_from(&mut self, start: &State, schedule: &Schedule) -> Box<Path> {
        let Some(mut path) = self.spare.pop() else {
            return Box::new(Path::new(start.clone(), schedule.clone()));
        };
        path.state.clone_from(start);
        path.schedule.clone_from(schedule);
        path.begin();
        path
    }

    /// Return the checked value; None if it breaks a property that is not selected.
    pub(crate) fn run_guarded<T>(&self, found: Result<T, Violation>) -> Result<Option<T>, Stop> {
        match found {
            Ok(value) => Ok(Some(value)),
            Err(found) if self.checker.checks.count(found.property) => Err(Stop::Broken(found)),
            Err(_) => Ok(None),
        }
    }

    pub(crate) fn possible(&mut self, state: &State) -> Result<Vec<Move>, Violation> {
        let children: Children = match self.symmetry.tokens {
            true => Some(known_children(state, &mut self.prefixes)?),
            false => None,
        };
        let mut found = std::mem::take(&mut self.moves);
        found.clear();
        moves(&self.world, state, &children, &mut found);
        Ok(found)
    }

    /// Return a copy of a path, in the room of one that is done with.
    fn copy_of(&mut self, path: &Path) -> Box<Path> {
        match self.spare.pop() {
            Some(mut copy) => {
                (*copy).clone_from(path);
                copy
            }
            None => Box::new(path.clone()),
        }
    }

    /// Make the calls of a move behind a path.
    pub(crate) fn make(&mut self, each: &Move, path: &Path) -> Result<Box<Path>, Violation> {
        let mut made = self.copy_of(path);
        made.names.push(each.name());
        let mut last: Option<Outcome> = None;
        let mut num_made = 0;
        while let Some(call) = each.next(&self.world, &made.state, num_made, last.as_ref()) {
            let outcome = match num_made {
                0 => self.call(&path.state, &mut made.state, &mut made.schedule, &call)?,
                _ => {
                    let mut before = self.spare.pop().unwrap_or_else(|| made.clone());
                    before.state.clone_from(&made.state);
                    let Path { state, schedule, .. } = &mut *made;
                    let outcome = self.call(&before.state, state, schedule, &call)?;
                    self.spare.push(before);
                    outcome
                }
            };
            // A refusal may change more than its commands tell: the batch after it is checked, too.
            made.changed |= !matches!(outcome.value, Value::Misuse(_) | Value::Flag(false));
            last = Some(outcome);
            num_made += 1;
        }
        if self.recording {
            made.calls.clone_from(&self.calls);
        }
        Ok(made)
    }

    /// Make a call and let a schedule follow it. state: equal to the one before.
    pub(crate) fn call(
        &mut self,
        before: &State,
        state: &mut State,
        schedule: &mut Schedule,
        call: &Call,
    ) -> Result<Outcome, Violation> {
        if self.recording {
            self.calls.push(call.clone());
        }
        let outcome = self.checker.perform(before, state, call, &self.world, &mut self.prefixes)?;
        schedule.follow(before, call, &outcome.value);
        Ok(outcome)
    }

    /// Return the edges of a path: as many as there are ways in which its loads end. keep: give it
    /// back.
    fn end_path(
        &mut self,
        start: &State,
        path: Box<Path>,
        keep: bool,
        visit: &mut Visit<'_, CoreModel>,
    ) -> Result<Option<Box<Path>>, Stop> {
        let more = if self.world.loads_fail { failures(&path) } else { Vec::new() };
        let kept = (keep || !more.is_empty()).then(|| self.copy_of(&path));
        self.end_edge(start, path, (None, None), visit)?;
        let Some(path) = kept else { return Ok(None) };
        for failing in more.into_iter().map(Some) {
            for late in self.late(&path, failing)? {
                let copy = self.copy_of(&path);
                self.end_edge(start, copy, (failing, late.as_ref()), visit)?;
            }
        }
        Ok(Some(path).filter(|_| keep))
    }

    /// One edge, to where it leads.
    fn end_edge(
        &mut self,
        start: &State,
        mut path: Box<Path>,
        ending: Ending<'_>,
        visit: &mut Visit<'_, CoreModel>,
    ) -> Result<(), Stop> {
        self.calls.clone_from(&path.calls);
        let closed = match path.changed {
            true => self.close(start, &mut path.state, &mut path.schedule, ending),
            false => Ok(()),
        };
        if self.run_guarded(closed)?.is_some() {
            self.checker.notes.note_moves(&path.names);
            let edge = self.num_edges;
            self.num_edges += 1;
            visit(self, edge, &path.state)?;
        }
        self.spare.push(path);
        Ok(())
    }
}

impl CoreModel {
    /// Return a packed node as bytes that other programs read, with the names of what does not hold
    /// there.
    pub(crate) fn findings(&mut self, node: &[u8]) -> Findings {
        let mut state = self.empty.clone();
        if unpack(node, &self.empty, &mut self.prefixes, &mut state).is_err() {
            return (Vec::new(), vec!["NOCRASH"]);
        }
        (encode(&state), self.checker.failing(&state))
    }
}

impl Walk for CoreModel {
    type Node<'n> = &'n State;

    fn record(&mut self) -> (&mut Notes, &mut bool, &mut Vec<Call>) {
        (&mut self.checker.notes, &mut self.recording, &mut self.calls)
    }

    fn empty(&self) -> State {
        self.empty.clone()
    }

    fn first<'n>(&self, empty: &'n State) -> &'n State {
        empty
    }

    fn state<'a>(node: &'a &State) -> &'a State {
        node
    }

    fn walk(&mut self, packed: &[u8], visit: &mut Visit<'_, CoreModel>) -> Result<(), Stop> {
        let new = || Box::new(Path::new(self.empty.clone(), Schedule::default()));
        let mut root = self.spare.pop().unwrap_or_else(new);
        root.begin();
        let walked = caught(|| {
            unpack(packed, &self.empty, &mut self.prefixes, &mut root.state)?;
            root.schedule.clone_from(&Schedule::default());
            root.schedule.assume(&root.state);
            self.walk_from(&root, visit)
        });
        self.spare.push(root);
        walked
    }

    fn fingerprint(&mut self, state: &&State) -> Result<Fingerprint, Violation> {
        Ok(self.keys.of(self.namer.canonical(state, &mut self.prefixes)?))
    }

    fn check(&mut self, state: &&State) -> Result<(), Violation> {
        self.checker.check_new(state, &self.world, &mut self.prefixes)
    }

    fn pack(&mut self, state: &State) -> Vec<u8> {
        let mut packed = Vec::with_capacity(128);
        pack(state, &mut self.prefixes, &mut packed);
        packed
    }
}

/// Return the result of a walk; a panic is a violation, too.
pub(crate) fn caught(walk: impl FnOnce() -> Result<(), Stop>) -> Result<(), Stop> {
    catch_unwind(AssertUnwindSafe(walk)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()));
        let detail = text.unwrap_or_else(|| "a call panicked".to_owned());
        Err(Stop::Broken(Violation::new("NOCRASH", detail)))
    })
}
