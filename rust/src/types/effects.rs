// SPDX-License-Identifier: Apache-2.0
//! What transitions emit: commands for the runtime, events for mirrors of the index.
//!
//! Invariants: a state's effects accumulate until its batch or its events are taken. Those of the
//! host pool are not recorded, since the swaps report all that concerns the runtime.
//! Twin: kvcore/types/effects.py.

use crate::types::clone_in_place::clone_in_place;
use crate::types::commands::{Command, Commands};
use crate::types::event_log::EventLog;
use crate::types::events::{News, removed};
use crate::types::keys::Key;

/// Commands and events, in the order in which they were made; events only if they are enabled.
#[derive(Debug, Default)]
pub struct Effects {
    /// Since the batch was opened.
    pub commands: Commands,
    /// Since they were last taken.
    pub events: EventLog,
    events_enabled: bool,
    silent: bool,
}

clone_in_place!(Effects { commands, events, events_enabled, silent });

impl Effects {
    /// No effects yet.
    #[must_use]
    pub fn new(events_enabled: bool) -> Self {
        Effects { events_enabled, ..Effects::default() }
    }

    /// Effects that are not read.
    #[must_use]
    pub fn silent() -> Self {
        Effects { silent: true, ..Effects::default() }
    }

    /// Whether events are wanted.
    #[must_use]
    pub fn events_enabled(&self) -> bool {
        self.events_enabled
    }

    /// Add a command.
    #[inline(always)] // see Commands::push
    pub fn emit(&mut self, command: Command) {
        if !self.silent {
            self.commands.push(command);
        }
    }

    /// Whether nothing is recorded.
    pub(crate) fn is_silent(&self) -> bool {
        self.silent
    }

    /// Add an event, if events are enabled.
    pub fn announce(&mut self, news: &News<'_>) {
        if self.events_enabled {
            self.events.push(news);
        }
    }

    /// Add an event that was written before, if events are enabled.
    pub(crate) fn announce_bytes(&mut self, event: &[u8]) {
        if self.events_enabled {
            self.events.push_bytes(event);
        }
    }

    /// Add the event for the removal of the last block of a key, if events are enabled.
    #[inline]
    pub fn announce_removed(&mut self, key: &Key) {
        if self.events_enabled {
            self.announce(&removed(key));
        }
    }
}
