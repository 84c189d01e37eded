// SPDX-License-Identifier: Apache-2.0
//! The form of a record by keys: hashes of full blocks, and nothing of what they are hashes of.
//!
//! A request or pin is named after the call that added it, or after its place when the record
//! began. Tokens are 0, a salt is the number of its floor, the seed is empty. Each request has the
//! hashes of its blocks as if they were its own. The state keeps no events, nor any that a batch is
//! to announce.
//! Twin: kvcore/record/names.py.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::record::pen::Pen;
use crate::state::state::State;
use crate::types::config::Config;
use crate::types::event_log::EventLog;
use crate::types::extra_inputs::ExtraKeys;
use crate::types::ids::Row;

const UNKNOWN: &str = "?";

/// The recording manager's state, and the names of a record by keys.
#[derive(Clone, Copy)]
pub(crate) struct Known<'a> {
    pub(crate) state: &'a State,
    pub(crate) names: Option<&'a Names>,
    /// The row of the request that the call before named: often it is the same one.
    pub(crate) row_before: u32,
}

impl<'a> Known<'a> {
    /// The row of a request.
    #[inline]
    pub(crate) fn row(self, id: &str) -> Option<u32> {
        let before = self.state.requests.get(self.row_before as usize);
        if let Some(Some(before)) = before
            && *before.request_id == *id
        {
            return Some(self.row_before);
        }
        self.state.rows.get(id).map(|row| row.0)
    }

    /// The id of a request as the record has it.
    pub(crate) fn name(self, row: Option<u32>, id: &'a str) -> &'a str {
        let Some(names) = self.names else { return id };
        row.map_or(stand_in(id), |row| &names.requests[&row])
    }

    /// The name of a pin as the record has it.
    pub(crate) fn pin(self, name: &'a str) -> &'a str {
        let Some(names) = self.names else { return name };
        names.pins.get(name).map_or(stand_in(name), |known| known)
    }
}

/// What a record by keys calls requests, by row, and pins, by name; and the running call.
pub(crate) struct Names {
    requests: FxHashMap<u32, String>,
    pins: FxHashMap<String, String>,
    /// The requests that the call extends: the row of each, and its number of hashes before.
    extended: Vec<(u32, usize)>,
    /// The pin that the call names.
    pin: Option<String>,
}

impl Names {
    /// The names at the start of a record.
    pub(crate) fn new(state: &State) -> Self {
        let rows = (0..).zip(&state.requests).filter(|(_, request)| request.is_some());
        let pins = state.named_pins.keys().enumerate();
        Names {
            requests: rows.map(|(row, _)| (row, format!("start-{row}"))).collect(),
            pins: pins.map(|(place, name)| (name.clone(), format!("start-{place}"))).collect(),
            extended: Vec::new(),
            pin: None,
        }
    }

    /// Note the pin that a call names, and the rows that it extends, before it runs.
    pub(crate) fn begin(&mut self, state: &State, pin: Option<&str>, rows: &[u32]) {
        self.pin = pin.map(str::to_owned);
        let num_hashes = |row: u32| {
            let request = state.requests.get(row as usize)?.as_ref()?;
            Some((row, request.block_hashes.len()))
        };
        self.extended.clear();
        self.extended.extend(rows.iter().copied().filter_map(num_hashes));
    }

    /// Note that call `number` added the request in this row.
    pub(crate) fn note_added(&mut self, row: u32, number: u64) {
        self.requests.insert(row, number.to_string());
        self.extended.push((row, 0));
    }

    /// Note that call `number` added the pin that it names, or removed it.
    pub(crate) fn note_pin(&mut self, number: u64) {
        let Some(pin) = self.pin.take() else { return };
        if self.pins.remove(&pin).is_none() {
            self.pins.insert(pin, number.to_string());
        }
    }

    /// Write the hashes that kvcore made for requests in a call: how many requests have some; of
    /// each its place in the call, their count and the hashes.
    pub(crate) fn put_new_hashes(&self, out: &mut Pen<'_>, state: &State) {
        let grown = (0_u64..).zip(&self.extended).filter_map(|(place, &(row, before))| {
            let request = &state[Row(row)];
            let hashes = request.block_hashes.get(before..).filter(|new| !new.is_empty())?;
            (!request.own_hashes).then_some((place, hashes))
        });
        out.put_varint(grown.clone().count() as u64);
        for (place, hashes) in grown {
            out.put_varint(place);
            out.put_varint(hashes.len() as u64);
            out.put_all(hashes.as_flattened());
        }
    }
}

/// The salt that stands for one with a floor; None for any other.
pub(crate) fn salt_of(config: &Config, salt: Option<&str>) -> Option<String> {
    let tenant = config.tenant_of(salt);
    (tenant > 0).then(|| format!("{tenant:02}"))
}

/// The state in this form, to be encoded.
pub(crate) fn keys_form(state: &State, names: &Names) -> State {
    let mut form = state.clone();
    let name_of = |row: u32| Arc::from(names.requests[&row].as_str());
    form.config.hash_seed.clear();
    form.config.enable_events = false;
    for (salt, _) in &mut form.config.floors {
        *salt = salt_of(&state.config, Some(salt)).expect("it has a floor");
    }
    for (row, request) in (0..).zip(&mut form.requests) {
        let Some(request) = request else { continue };
        request.request_id = name_of(row);
        request.tokens.fill(0);
        request.drafts.fill(0);
        request.own_hashes = true;
        let salt = salt_of(&state.config, request.extra_keys().cache_salt.as_deref());
        request.extra_keys =
            salt.map(|salt| Arc::new(ExtraKeys { cache_salt: Some(salt), ..ExtraKeys::default() }));
    }
    for merge in &mut form.batch.merges {
        merge.request_id = name_of(state.rows[&merge.request_id].0);
    }
    form.effects.events = EventLog::default();
    form.device.silent.clear();
    for batch in &mut form.in_flight {
        Arc::make_mut(batch).owed.iter_mut().for_each(|owed| owed.event = None);
    }
    let pins = state.named_pins.iter();
    form.named_pins = pins.map(|(name, pin)| (names.pins[name].clone(), pin.clone())).collect();
    form
}

fn stand_in(name: &str) -> &str {
    if name.is_empty() { name } else { UNKNOWN }
}
