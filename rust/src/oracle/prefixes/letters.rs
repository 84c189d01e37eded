// SPDX-License-Identifier: Apache-2.0
//! What each token of a request adds to its prefix: itself, or a number for it and what stands in
//! its place.
//!
//! A part of prefixes.rs.

use crate::oracle::prefixes::{Letter, Numbers, Prefixes};
use crate::state::state::RequestState;
use crate::types::extra_inputs::{ExtraKeys, LoRA, MediaItem};

/// Letters from here on stand for more than a token.
const FIRST_EXTRA: Letter = 1 << 31;
/// A token with what stands in its place.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Extra {
    token: u32,
    lora: Option<(String, String)>,
    salt: Option<String>,
    media: Vec<(String, u32)>,
    row: Option<[u8; 32]>,
}

impl Prefixes {
    /// What each token and draft of a request adds to its prefix.
    pub fn letters(&mut self, request: &RequestState) -> Numbers {
        let tokens = request.tokens.iter().chain(&request.drafts).copied();
        let Some(extra_keys) = &request.extra_keys else { return tokens.collect() };
        let all: Vec<u32> = tokens.collect();
        let extras = extras(&all, extra_keys, self.hash_block_size);
        extras.into_iter().map(|extra| self.letter(extra)).collect()
    }

    fn letter(&mut self, extra: Extra) -> Letter {
        if extra.lora.is_none()
            && extra.salt.is_none()
            && extra.media.is_empty()
            && extra.row.is_none()
        {
            return extra.token;
        }
        let mut tree = self.tree();
        let next = FIRST_EXTRA + tree.extras.len() as Letter;
        *tree.extras.entry(extra).or_insert(next)
    }
}

/// Each token with what stands in its place.
fn extras(tokens: &[u32], extra_keys: &ExtraKeys, hash_block_size: u32) -> Vec<Extra> {
    let lora = extra_keys.lora.as_ref().map(|LoRA { name, path }| (name.clone(), path.clone()));
    let places = media_places(&extra_keys.media, tokens.len());
    let at = |(position, media): (usize, Vec<(String, u32)>)| Extra {
        token: tokens[position],
        lora: lora.clone(),
        salt: extra_keys.cache_salt.clone().filter(|_| position == 0),
        media,
        row: (position < extra_keys.num_rows as usize)
            .then(|| extra_keys.embeds[position / hash_block_size as usize]),
    };
    places.into_iter().enumerate().map(at).collect()
}

/// The items in each position, and how far into them that is: a cut changes neither.
fn media_places(media: &[MediaItem], num_tokens: usize) -> Vec<Vec<(String, u32)>> {
    let mut places = vec![Vec::new(); num_tokens];
    for item in media {
        for (index, place) in (0..item.length).zip(&mut places[item.offset as usize..]) {
            place.push((item.identifier.clone(), index));
        }
    }
    places
}
