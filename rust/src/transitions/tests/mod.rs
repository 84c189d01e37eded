// SPDX-License-Identifier: Apache-2.0
//! What the unit tests of the transitions share.

pub(crate) use crate::state::state::{State, make_state};
pub(crate) use crate::transitions::allocate::allocate_slots;
pub(crate) use crate::transitions::append::{Requests, append};
pub(crate) use crate::transitions::batches::{complete, take_batch};
pub(crate) use crate::transitions::requests::add_request;
pub(crate) use crate::types::commands::Command;
pub(crate) use crate::types::config::Config;
pub(crate) use crate::types::ids::{BlockId, Row};
pub(crate) use crate::types::slot_request::SlotRequest;
pub(crate) use crate::types::values::Request;

/// Add a request and schedule its first tokens.
pub(crate) fn admit(state: &mut State, id: &str, tokens: &[u32], num_tokens: i64) -> Row {
    let row = add_request(state, Request::new(id, tokens)).unwrap();
    allocate_slots(state, id, &SlotRequest::new(num_tokens)).unwrap().unwrap();
    row
}

/// The commands of the open batch.
pub(crate) fn commands(state: &State) -> Vec<Command> {
    state.effects.commands.iter().collect()
}
