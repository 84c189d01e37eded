// SPDX-License-Identifier: Apache-2.0
//! Extra keys: read from what a request brings.
//!
//! Their forms are defined in `types/extra_inputs.rs`. Twin: kvcore/hashing/extra_keys.py.

use crate::types::errors::{Error, Field};
use crate::types::extra_inputs::{
    ExtraKeys, GivenKeys, MAX_MEDIA, MediaItem, PromptEmbeds, digest_of,
};

const TEXT: &str = "a non-empty str";
const FEW_MEDIA: &str = "at most 252";

/// Return the extra keys of a request whose prompt has `num_tokens` tokens.
///
/// Fails with InvalidExtraKey for an empty salt and for more media items in a block than its hash
/// can count, UnsortedMedia for items that are not sorted by offset or reach past the prompt,
/// CountMismatch for embeddings that do not have the prompt's size.
pub fn read_extra_keys(
    request_id: &str,
    given: GivenKeys<'_>,
    num_tokens: u32,
    hash_block_size: u32,
) -> Result<ExtraKeys, Error> {
    let GivenKeys { lora, media, cache_salt, prompt_embeds } = given;
    if cache_salt == Some("") {
        let (name, value) = ("cache_salt".to_owned(), "".into());
        return Err(Error::InvalidExtraKey { name, expected: TEXT, value });
    }
    check_media(request_id, &media, num_tokens, hash_block_size)?;
    let mut embeds = Vec::new();
    if let Some(PromptEmbeds { data, bytes_per_token }) = prompt_embeds {
        let (given, row) = (data.len() as i64, i64::from(bytes_per_token));
        let expected = i64::from(num_tokens) * row;
        if given != expected {
            let (request, name) = (request_id.to_owned(), "bytes of prompt embeddings");
            return Err(Error::CountMismatch { request, name, given, expected });
        }
        let step = hash_block_size as usize * bytes_per_token as usize;
        embeds.extend(data.chunks(step).map(digest_of));
    }
    let num_rows = if embeds.is_empty() { 0 } else { num_tokens };
    let cache_salt = cache_salt.map(str::to_owned);
    Ok(ExtraKeys { lora, media, cache_salt, embeds, num_rows, ..ExtraKeys::default() })
}

fn check_media(
    request_id: &str,
    media: &[MediaItem],
    num_tokens: u32,
    block_size: u32,
) -> Result<(), Error> {
    let mut first = 0;
    for (position, item) in media.iter().enumerate() {
        if u64::from(item.offset) < first || item.end() > u64::from(num_tokens) {
            return Err(Error::UnsortedMedia {
                request: request_id.to_owned(),
                position: position as i64,
                offset: i64::from(item.offset),
                length: i64::from(item.length),
                first: first as i64,
                num_tokens: i64::from(num_tokens),
            });
        }
        first = u64::from(item.offset);
    }
    let block_size = u64::from(block_size);
    let mut last_blocks: Vec<_> = media.iter().map(|item| (item.end() - 1) / block_size).collect();
    last_blocks.sort_unstable();
    for (position, item) in media.iter().enumerate() {
        let block = u64::from(item.offset) / block_size;
        let num_items = position + 1 - last_blocks.partition_point(|last| *last < block);
        if num_items > MAX_MEDIA {
            let name =
                format!("the number of media items in the block where item {position} begins");
            let value = Field::from(num_items as i64);
            return Err(Error::InvalidExtraKey { name, expected: FEW_MEDIA, value });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
