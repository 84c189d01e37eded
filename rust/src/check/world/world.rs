// SPDX-License-Identifier: Apache-2.0
//! A world: how far an exploration goes, by which moves, and which names it folds together.
//!
//! A world is plain data, so that the same world is explored in both languages. A move is what an
//! engine does at once: one call, or a few that belong together. Twin: kvcore/check/world/world.py.

use crate::types::config::Config;
use crate::types::extra_inputs::{GivenKeys, LoRA, MediaItem, PromptEmbeds};
use crate::types::retention::Piece;

/// The calls that a world tries unless it says otherwise.
pub const BASIC_CALLS: &str =
    "add_request allocate_slots append fork free remove_request reset_prefix_cache";

/// The names that are renamed to fold states: those of requests, blocks and tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // the fields are the things that the type names
pub struct Symmetry {
    pub requests: bool,
    pub blocks: bool,
    pub tokens: bool,
}

impl Default for Symmetry {
    fn default() -> Self {
        Symmetry { requests: true, blocks: true, tokens: true }
    }
}

/// The kind of a move of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moves {
    /// One call.
    Calls,
    /// One action of an engine, which is a few calls.
    Engine,
}

/// The properties of a new request besides its tokens.
#[derive(Debug, Clone, Default)]
pub struct KindOfRequest {
    /// The adapter.
    pub lora: Option<LoRA>,
    /// In any order.
    pub media: Vec<MediaItem>,
    /// The salt.
    pub cache_salt: Option<String>,
    /// Rows of embeddings, and bytes of one.
    pub embeds: Option<(Vec<u8>, u32)>,
    /// It never hits.
    pub skip_reading: bool,
    /// The engine hashes its blocks, and hands in the hashes later.
    pub own_hashes: bool,
    /// How long its content should stay cached.
    pub retention: Option<Vec<Piece>>,
}

impl KindOfRequest {
    /// Return the extra keys as a request brings them.
    #[must_use]
    pub fn extra_keys(&self) -> GivenKeys<'_> {
        GivenKeys {
            lora: self.lora.clone(),
            media: self.media.clone(),
            cache_salt: self.cache_salt.as_deref(),
            prompt_embeds: self
                .embeds
                .as_ref()
                .map(|(data, size)| PromptEmbeds { data, bytes_per_token: *size }),
        }
    }
}

/// How far an exploration goes, and by which calls.
#[derive(Debug, Clone)]
pub struct World {
    /// Of the manager.
    pub config: Config,
    /// Most requests at a time.
    pub num_requests: u32,
    /// Most tokens of a request.
    pub num_tokens: u32,
    /// Most tokens of a new request.
    pub num_prompt: u32,
    /// Different tokens that can follow one prefix.
    pub num_letters: u32,
    /// Most drafts at a time.
    pub num_drafts: u32,
    /// Most lookahead tokens that a call asks for.
    pub num_lookahead: u32,
    /// Most external tokens that a call asks for.
    pub num_external: u32,
    /// Encoder tokens that a request brings with its first slots.
    pub num_encoder: u32,
    /// Most pins at a time; no store begins while this many operations are in flight.
    pub num_pins: u32,
    /// Most positions to come that one call schedules; above 0, the engine runs ahead.
    pub num_output_placeholders: u32,
    /// Most outputs that such an engine has yet to hand in.
    pub num_outputs: u32,
    /// Whether what a batch to come overwrites before anything reads it counts as unknown.
    pub forgets_overwritten: bool,
    /// Whether calls delay the caching of their blocks, or not, each in turn.
    pub delays: Vec<bool>,
    /// Whether calls also keep the state after their tokens, where hits can end.
    pub marks: bool,
    /// What new requests have besides their tokens, each in turn.
    pub kinds_of_requests: Vec<KindOfRequest>,
    /// Most moves between two `take_batch`.
    pub moves_per_batch: u32,
    /// Every load of external tokens also fails, from each of its tokens on.
    pub loads_fail: bool,
    /// Names of the transitions to try.
    pub calls: Vec<String>,
    /// The kind of a move of a path.
    pub moves: Moves,
}

impl World {
    /// At most this many requests, tokens per request and tokens per prompt; the basic calls, each
    /// by itself, and no other feature.
    #[must_use]
    pub fn new(config: Config, num_requests: u32, num_tokens: u32, num_prompt: u32) -> Self {
        World {
            config,
            num_requests,
            num_tokens,
            num_prompt,
            num_letters: 2,
            num_drafts: 0,
            num_lookahead: 0,
            num_external: 0,
            num_encoder: 0,
            num_pins: 1,
            num_output_placeholders: 0,
            num_outputs: 2,
            forgets_overwritten: false,
            delays: vec![false],
            marks: false,
            kinds_of_requests: vec![KindOfRequest::default()],
            moves_per_batch: 1,
            loads_fail: false,
            calls: BASIC_CALLS.split(' ').map(str::to_owned).collect(),
            moves: Moves::Calls,
        }
    }

    /// Tell whether a transition is to be tried.
    #[must_use]
    pub fn tries(&self, call: &str) -> bool {
        self.calls.iter().any(|each| each == call)
    }
}
