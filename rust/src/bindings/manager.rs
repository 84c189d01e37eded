// SPDX-License-Identifier: Apache-2.0
//! `kvcore._rust.Manager`: one state, and how a call reaches it.
//! Its methods are in `methods.rs` and `queries.rs`.
//!
//! A call reads its arguments, runs one transition and makes its result. The state is borrowed for
//! the transition alone, in which no Python runs; while an argument runs code of its own, that code
//! may query the manager, but not change it. A call of many tokens lets other threads run
//! meanwhile; one that finds the state borrowed raises ConcurrentCall.

use pyo3::prelude::*;
use smallvec::SmallVec;

use crate::bindings::arguments::{BlocksArg, CountArg, IdArg, IdsArg, TokensArg, held, items};
use crate::bindings::errors::{CallError, Given, raise};
use crate::bindings::lists::{only_id, only_item};
use crate::bindings::tape::Tape;
use crate::bindings::tokens::{Named, Signed, TOKENS, read_named, read_signed};
use crate::bindings::values;
use crate::bindings::values::{PyAppended, PyBlocks, PyMoved};
use crate::record::calls::{APPEND, Argument, Call, Options};
use crate::record::fields::{ReadTokens, find_rows};
use crate::record::outcomes::{Named as NamedError, Outcome};
use crate::state::state::{RequestState, State};
use crate::transitions::append::{
    Requests, all_own_hashes, append, places_grown, read_request_ids,
};
use crate::transitions::queries::find_request;
use crate::types::commands::Batch;
use crate::types::errors::Error;
use crate::types::values::{Admitted, Appended, Output, Swapped};

/// A manager's state, and what calls do to it. `kvcore.KVCacheManager` is the way to use it.
///
/// A call that raises has changed nothing. Raises ConcurrentCall while another thread's call runs.
#[pyclass(module = "kvcore._rust")]
pub(crate) struct Manager {
    pub(crate) state: State,
    /// The `KVCacheBlocks` that all calls return that grow no table.
    no_blocks: Py<PyAny>,
    /// The `Appended` of one request without a refusal.
    appended_one: Py<PyAny>,
    /// The last `Appended` without a refusal, and its count: most steps return the same one.
    appended: (u64, Py<PyAny>),
    /// The last batch that was taken, whose memory is reused.
    pub(crate) room: Batch,
    /// The record of its calls, while there is one.
    pub(crate) tape: Option<Box<Tape>>,
}

/// A number of tokens whose hashing takes about half a millisecond: other threads run meanwhile.
const MANY_TOKENS: usize = 1 << 14;

impl Manager {
    /// The manager, to change. Raises ConcurrentCall.
    #[inline]
    pub(crate) fn lent<'py>(this: &Bound<'py, Self>) -> PyResult<PyRefMut<'py, Self>> {
        this.try_borrow_mut().map_err(|_| raise(this.py(), Error::ConcurrentCall {}))
    }

    /// The manager, to read. Raises ConcurrentCall.
    #[inline]
    pub(crate) fn shown<'py>(this: &Bound<'py, Self>) -> PyResult<PyRef<'py, Self>> {
        this.try_borrow().map_err(|_| raise(this.py(), Error::ConcurrentCall {}))
    }

    /// A manager that holds this state.
    pub(crate) fn of(py: Python<'_>, state: State) -> PyResult<Self> {
        let no_blocks = values::no_blocks(py, state.config.groups.len())?.0.unbind();
        let appended = values::appended(py, Appended { done: 1, refused: None }, &[])?.0.unbind();
        let appended_one = appended.clone_ref(py);
        let appended = (1, appended);
        Ok(Manager { state, no_blocks, appended_one, appended, room: Batch::default(), tape: None })
    }

    /// Run a transition.
    pub(crate) fn change<T: Outcome, E: Into<CallError> + NamedError>(
        this: &Bound<'_, Self>,
        given: &Given<'_>,
        call: Call<'_>,
        transition: impl FnOnce(&mut State) -> Result<T, E>,
    ) -> PyResult<T> {
        let mut manager = Self::lent(this)?;
        manager.begin(this.py(), &call);
        let outcome = transition(&mut manager.state);
        manager.end(this.py(), &outcome);
        drop(manager);
        outcome.map_err(|wrong| wrong.into().raise(this.py(), given))
    }

    /// Run a transition that takes tokens, and other arguments; `note` begins its record.
    pub(crate) fn change_by<A: Send, T: Outcome + Send>(
        this: &Bound<'_, Self>,
        given: &Given<'_>,
        (tokens, rest): (Signed, A),
        note: impl FnOnce(&mut Self, ReadTokens<'_>, &A),
        transition: impl FnOnce(&mut State, Signed, A) -> Result<T, CallError> + Send,
    ) -> PyResult<T> {
        let mut manager = Self::lent(this)?;
        note(&mut manager, tokens.shown(), &rest);
        let state = &mut manager.state;
        let outcome = if tokens.len() < MANY_TOKENS {
            transition(state, tokens, rest)
        } else {
            this.py().detach(|| transition(state, tokens, rest))
        };
        manager.end(this.py(), &outcome);
        drop(manager);
        outcome.map_err(|wrong| wrong.raise(this.py(), given))
    }

    /// Run a transition without arguments, which cannot fail.
    pub(crate) fn drain<T: Outcome>(
        this: &Bound<'_, Self>,
        opcode: u8,
        transition: impl FnOnce(&mut State) -> T,
    ) -> PyResult<T> {
        let run = |state: &mut State| Ok::<_, Error>(transition(state));
        Self::change(this, &Given::default(), Call::new(opcode, &[]), run)
    }

    /// Run a transition of one request.
    pub(crate) fn change_one<T: Outcome>(
        this: &Bound<'_, Self>,
        opcode: u8,
        request_id: IdArg<'_, '_>,
        transition: impl FnOnce(&mut State, &str) -> Result<T, Error>,
    ) -> PyResult<T> {
        let mut given = Given::of(this);
        let name = given.name(request_id.0);
        let fields = [Argument::Request(name)];
        let call = Call::new(opcode, &fields);
        Self::change(this, &given, call, |state| transition(state, name))
    }

    /// Run a transition of one request and a number.
    pub(crate) fn change_count<'py>(
        this: &Bound<'py, Self>,
        opcode: u8,
        request_id: IdArg<'_, 'py>,
        count: CountArg<'_, 'py>,
        transition: impl FnOnce(&mut State, &str, i64) -> Result<(), Error>,
    ) -> PyResult<()> {
        let mut given = Given::of(this);
        let (name, number) = (given.name(request_id.0), given.count(count)?);
        let fields = [Argument::Request(name), Argument::Number(number)];
        let call = Call::new(opcode, &fields);
        Self::change(this, &given, call, |state| transition(state, name, number))
    }

    /// Run a transition of a number.
    pub(crate) fn change_number<'py>(
        this: &Bound<'py, Self>,
        opcode: u8,
        number: CountArg<'_, 'py>,
        transition: impl FnOnce(&mut State, i64) -> Result<(), Error>,
    ) -> PyResult<()> {
        let mut given = Given::of(this);
        let number = given.count(number)?;
        let fields = [Argument::Number(number)];
        Self::change(this, &given, Call::new(opcode, &fields), |state| transition(state, number))
    }

    /// Run a transition of some blocks.
    pub(crate) fn change_blocks<T: Outcome>(
        this: &Bound<'_, Self>,
        opcode: u8,
        block_ids: BlocksArg<'_, '_>,
        transition: impl FnOnce(&mut State, &[i64]) -> Result<T, Error>,
    ) -> PyResult<T> {
        let mut given = Given::of(this);
        let blocks = given.blocks(block_ids)?;
        let fields = [Argument::Blocks(&blocks)];
        let call = Call::new(opcode, &fields);
        Self::change(this, &given, call, |state| transition(state, &blocks))
    }

    /// Run a transition of some requests.
    pub(crate) fn change_all<'py>(
        this: &Bound<'py, Self>,
        opcode: u8,
        request_ids: IdsArg<'_, 'py>,
        transition: impl FnOnce(&mut State, &[&str]) -> Result<Admitted<Swapped>, Error>,
    ) -> PyResult<PyMoved<'py>> {
        let mut given = Given::of(this);
        let ids: Vec<_> = items(request_ids.0)?.iter().collect();
        let names = given.names(&ids);
        let fields = [Argument::Requests(Requests::Ids(&names))];
        let call = Call::new(opcode, &fields);
        let outcome = Self::change(this, &given, call, |state| transition(state, &names))?;
        values::moved(this.py(), outcome)
    }

    /// Run a query.
    pub(crate) fn query<T>(
        this: &Bound<'_, Self>,
        given: &Given<'_>,
        read: impl FnOnce(&State) -> Result<T, Error>,
    ) -> PyResult<T> {
        let outcome = read(&Self::shown(this)?.state);
        outcome.map_err(|error| CallError::from(error).raise(this.py(), given))
    }

    /// Run a query about one request.
    pub(crate) fn query_of<T>(
        this: &Bound<'_, Self>,
        request_id: IdArg<'_, '_>,
        read: impl FnOnce(&State, &str) -> Result<T, Error>,
    ) -> PyResult<T> {
        let mut given = Given::default();
        let name = given.name(request_id.0);
        Self::query(this, &given, |state| read(state, name))
    }

    /// Run a query of one request.
    pub(crate) fn query_one<T>(
        this: &Bound<'_, Self>,
        request_id: IdArg<'_, '_>,
        read: impl FnOnce(&RequestState) -> T,
    ) -> PyResult<T> {
        Self::query_of(this, request_id, |state, name| find_request(state, name).map(read))
    }

    /// The `KVCacheBlocks` of a call that grew no table.
    pub(crate) fn grown_none<'py>(this: &Bound<'py, Self>) -> PyResult<PyBlocks<'py>> {
        Ok(PyBlocks(Self::shown(this)?.no_blocks.bind(this.py()).clone()))
    }

    /// How far an `append` came, and the places of tables that it set.
    pub(crate) fn appended<'py>(
        this: &Bound<'py, Self>,
        (far, grown): (Appended, Vec<[u32; 4]>),
    ) -> PyResult<PyAppended<'py>> {
        let py = this.py();
        if far.refused.is_some() || !grown.is_empty() {
            return values::appended(py, far, &grown);
        }
        if Self::shown(this)?.appended.0 == far.done {
            return Ok(PyAppended(Self::shown(this)?.appended.1.bind(py).clone()));
        }
        let made = values::appended(py, far, &[])?;
        Self::lent(this)?.appended = (far.done, made.0.clone().unbind());
        Ok(made)
    }

    /// Append one token to one id, both read in place; None for any other call.
    pub(crate) fn append_one<'py>(
        this: &Bound<'py, Self>,
        given: &Given<'py>,
        [requests, tokens]: [Borrowed<'_, 'py, PyAny>; 2],
        batch: Option<i64>,
    ) -> PyResult<Option<PyAppended<'py>>> {
        let (Some(id), Some(token)) = (only_item(requests), only_id(tokens)) else {
            return Ok(None);
        };
        let name = match <&str>::extract(id.as_borrowed()) {
            Ok(name) if !name.is_empty() => name,
            _ => return Ok(None),
        };
        let mut manager = Self::lent(this)?;
        let (ids, tokens) = ([name], [token]);
        let output = Output { tokens: Some(&tokens), batch, ..Output::default() };
        let row = if manager.tape.is_some() { manager.state.rows.get(name) } else { None };
        let row = row.map(|row| [row.0]); // looked up once, for the record and the call
        let requests = row.as_ref().map_or(Requests::Ids(&ids), |row| Requests::Rows(row));
        if manager.tape.is_some() {
            manager.begin_append(this.py(), requests, Some(Some((&tokens, false))), batch);
        }
        let outcome = append_grown(&mut manager.state, requests, output);
        manager.end(this.py(), &outcome);
        if let Ok((Appended { done: 1, refused: None }, grown)) = &outcome
            && grown.is_empty()
        {
            return Ok(Some(PyAppended(manager.appended_one.bind(this.py()).clone())));
        }
        drop(manager);
        match outcome {
            Ok(done) => Self::appended(this, done).map(Some),
            Err(error) => Err(CallError::from(error).raise(this.py(), given)),
        }
    }

    /// Append to requests that were read.
    fn append_named(
        slf: &Bound<'_, Self>,
        given: &Given<'_>,
        requests: Requests<'_>,
        tokens: Option<Signed>,
        batch: Option<i64>,
    ) -> PyResult<(Appended, Vec<[u32; 4]>)> {
        let mut manager = Self::lent(slf)?;
        let rows: SmallVec<[u32; 4]>;
        let mut requests = requests;
        if manager.tape.is_some() {
            if let Requests::Ids(ids) = requests
                && let Some(found) = find_rows(&manager.state, ids)
            {
                rows = found; // looked up once, for the record and the call
                requests = Requests::Rows(&rows);
            }
            let tokens = tokens.as_ref().map(Signed::shown);
            manager.begin_append(slf.py(), requests, tokens, batch);
        }
        let outcome = append_read(&mut manager.state, requests, tokens, batch);
        manager.end(slf.py(), &outcome);
        drop(manager);
        outcome.map_err(|wrong| wrong.raise(slf.py(), given))
    }

    /// Begin the record of an `append`.
    #[inline(never)] // calls that are not recorded do not pay for it
    fn begin_append(
        &mut self,
        py: Python<'_>,
        requests: Requests<'_>,
        tokens: Option<ReadTokens<'_>>,
        batch: Option<i64>,
    ) {
        let options = [tokens.map(Argument::Tokens), batch.map(Argument::Number)];
        let fields = [Argument::Requests(requests)];
        self.begin(py, &Call::new(APPEND, &fields).with(Options::Given(&options)));
    }

    /// Append to any requests, by ids or rows.
    pub(crate) fn append_all<'py>(
        slf: &Bound<'py, Self>,
        given: &mut Given<'py>,
        requests: TokensArg<'_, 'py>,
        tokens: Option<TokensArg<'_, 'py>>,
        batch: Option<i64>,
    ) -> PyResult<PyAppended<'py>> {
        let named = match held(requests.0) {
            Some(ids) => Ok(ids),
            None => match read_named(given, requests)? {
                Named::Ids(ids) => Ok(ids.iter().collect()),
                Named::Rows(rows) => Err(rows),
            },
        };
        let tokens_read = tokens.map(|tokens| read_signed(given, tokens, &TOKENS));
        let done = match named {
            Ok(ids) => {
                let names = given.names(&ids);
                Self::append_named(slf, given, Requests::Ids(&names), tokens_read, batch)?
            }
            Err(rows) => Self::append_named(slf, given, Requests::Rows(&rows), tokens_read, batch)?,
        };
        Self::appended(slf, done)
    }
}

/// Append tokens that were read; rows without a request are reported before wrong tokens.
#[inline(always)] // of each step
fn append_read(
    state: &mut State,
    requests: Requests<'_>,
    tokens: Option<Signed>,
    batch: Option<i64>,
) -> Result<(Appended, Vec<[u32; 4]>), CallError> {
    let allowed = || all_own_hashes(state, &requests);
    let tokens = tokens.map(|tokens| tokens.taken(allowed)).transpose();
    if let (Err(_), Requests::Rows(rows)) = (&tokens, &requests) {
        read_request_ids(state, rows)?;
    }
    let tokens = tokens?;
    let output = Output { tokens: tokens.as_deref(), batch, ..Output::default() };
    Ok(append_grown(state, requests, output)?)
}

/// Append, and return the places of tables that were set; nothing is allocated if there are none.
fn append_grown(
    state: &mut State,
    requests: Requests<'_>,
    output: Output<'_>,
) -> Result<(Appended, Vec<[u32; 4]>), Error> {
    let first = state.effects.commands.len();
    let far = append(state, requests, output)?;
    if state.effects.commands.len() == first {
        return Ok((far, Vec::new()));
    }
    let found: Vec<u32>;
    let rows = match requests {
        Requests::Rows(rows) => rows,
        Requests::Ids(ids) => {
            found = ids.iter().map(|id| state.rows[*id].0).collect();
            &found[..]
        }
    };
    Ok((far, places_grown(state, rows, first)))
}
