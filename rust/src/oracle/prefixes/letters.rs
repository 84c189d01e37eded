// SPDX-License-Identifier: Apache-2.0
//! What each token of a request adds to its prefix: itself, or a number for it and what stands in
//! its place; and the prefix that a hash stands for.
//!
//! A part of prefixes.rs.

use crate::types::extra_inputs::{ExtraKeys, LoRA, MediaItem};

/// What one position adds to a prefix: its token, or a number for it and what stands in its place.
pub type Letter = u32;

/// What a hash stands for: the first `end` tokens of a request, and their letters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// Of the prefix.
    pub tokens: Vec<u32>,
    /// Of the prefix.
    pub letters: Vec<Letter>,
    /// The number of the prefix that ends with each token.
    pub nodes: Vec<u32>,
    /// Of the hash.
    pub number: u32,
}

impl Chain {
    /// Tokens of the prefix.
    #[must_use]
    pub fn end(&self) -> u32 {
        self.tokens.len() as u32
    }

    /// The number of the whole prefix.
    #[must_use]
    pub fn last(&self) -> u32 {
        self.nodes.last().copied().unwrap_or(0)
    }
}

/// A token with what stands in its place.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Extra {
    pub(super) token: u32,
    pub(super) lora: Option<(String, String)>,
    pub(super) salt: Option<String>,
    pub(super) media: Vec<(String, u32)>,
    pub(super) row: Option<[u8; 32]>,
}

/// Each token with what stands in its place.
pub(super) fn extras(tokens: &[u32], extra_keys: &ExtraKeys, hash_block_size: u32) -> Vec<Extra> {
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
