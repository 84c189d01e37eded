// SPDX-License-Identifier: Apache-2.0
//! The words of text traces: what calls are made of, and what they come to.
//!
//! Why: Python's runner reads these words by its own conversions.

use std::collections::HashMap;

use crate::pool::block_pool::BlockPool;
use crate::pool::quarantine::Quarantine;
use crate::pool::retention_state::level_of;
use crate::trace::text::{Value, read_tokens, write_ids};
use crate::types::errors::Error;
use crate::types::extra_inputs::{LoRA, MediaItem, PromptEmbeds};
use crate::types::ids::BlockId;
use crate::types::keys::HASH_SIZE;
use crate::types::retention::{DEFAULT_WISH, DURATION_MAX, LEVEL_MAX, POSITION_MAX, Piece, Wish};
use crate::types::slot_request::{RequestedHit, SlotOption, SlotRequest};
use crate::types::values::{Admitted, GivenHashes, Hit, Output, Request, Verdict};

/// Why a call has no value.
#[derive(Debug)]
pub enum Failure {
    /// The core's error.
    Misuse(Error),
    /// Its words cannot be read.
    Words,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Misuse(error)
    }
}

/// What a call comes to.
pub type Called = Result<Value, Failure>;

/// The request of its id, tokens and options.
pub fn read_request<'a>(words: &[&'a str]) -> Option<Request<'a>> {
    let [request_id, tokens, options @ ..] = words else { return None };
    let mut request = Request::new(request_id, &read_tokens(tokens)?);
    let extra = &mut request.extra_keys;
    for &option in options {
        match option.split_once('=').unwrap_or((option, "")) {
            ("lora", "") => return None,
            ("lora", name) => {
                extra.lora = Some(LoRA { name: name.to_owned(), path: String::new() });
            }
            ("media", items) => {
                extra.media = items.split(',').map(read_media).collect::<Option<_>>()?;
            }
            ("salt", salt) => extra.cache_salt = Some(salt),
            ("embeds", rows) => {
                let data = rows.as_bytes();
                extra.prompt_embeds = Some(PromptEmbeds { data, bytes_per_token: 1 });
            }
            ("own", hashes) => request.block_hashes = Some(read_hashes(hashes)),
            ("retain", pieces) => request.retention = Some(read_pieces(pieces)?),
            ("skip", "") => request.skip_reading_prefix_cache = true,
            _ => return None,
        }
    }
    Some(request)
}

/// The request of a call and its options; hits: the last one of each request.
pub fn read_slot_request<'a>(
    words: &[&'a str],
    hits: &HashMap<String, Hit>,
) -> Result<(&'a str, SlotRequest), Failure> {
    let [request_id, count, options @ ..] = words else { return Err(Failure::Words) };
    let mut slot_request = SlotRequest::new(number(count)?);
    for option in options {
        let (word, value) = option.split_once('=').unwrap_or((option, ""));
        let is_meant = |name: &str| word_of(name) == word;
        if (word, value) == ("hit", "") {
            let hit = hits.get(*request_id).ok_or(Failure::Words)?;
            slot_request.hit = Some(RequestedHit::from(hit));
            continue;
        }
        match slot_request.options().into_iter().find(|each| is_meant(each.0)) {
            Some((_, SlotOption::Count(count))) => *count = number(value)?,
            Some((_, SlotOption::Flag(flag))) if value.is_empty() => *flag = true,
            _ => return Err(Failure::Words),
        }
    }
    Ok((request_id, slot_request))
}

/// The word of an option of an allocation: the first of its name behind `num_`.
fn word_of(name: &str) -> &str {
    let name = name.strip_prefix("num_").unwrap_or(name);
    name.split('_').next().unwrap_or(name)
}

/// The item of `name@offset+length`.
fn read_media(word: &str) -> Option<MediaItem> {
    let (identifier, place) = word.split_once('@')?;
    let (offset, length) = place.split_once('+')?;
    let (offset, length) = (offset.parse().ok()?, length.parse().ok()?);
    let is_there = !identifier.is_empty() && length > 0;
    is_there.then(|| MediaItem { identifier: identifier.to_owned(), offset, length })
}

/// The pieces of `0+4@80/1000,8+@50,decode@20`: ranges by offset and length, with level and ms.
pub fn read_pieces(word: &str) -> Option<Vec<Piece>> {
    let (mut pieces, mut last): (Vec<Piece>, u32) = (Vec::new(), 0);
    let mut decoded = DEFAULT_WISH;
    for part in word.split(',') {
        let (place, wish) = part.split_once('@')?;
        let (level, duration) = match wish.split_once('/') {
            Some((level, duration)) => (level, Some(duration.parse().ok()?)),
            None => (wish, None),
        };
        let level = level.parse().ok().filter(|&level| level <= LEVEL_MAX)?;
        if duration.is_some_and(|duration| !(1..=DURATION_MAX).contains(&duration)) {
            return None;
        }
        let wish = Wish::new(level, duration);
        if place == "decode" {
            decoded = wish;
            continue;
        }
        let (first, length) = place.split_once('+').unwrap_or((place, ""));
        let first: u32 = first.parse().ok()?;
        let length: Option<u32> = (!length.is_empty()).then(|| length.parse()).transpose().ok()?;
        let end =
            length.map(|length| first.checked_add(length)).map_or(Some(None), |e| e.map(Some))?;
        let past = end.unwrap_or(POSITION_MAX);
        if first < last || first >= past || past > POSITION_MAX {
            return None;
        }
        last = past;
        pieces.push((first, end, wish));
    }
    pieces.push((POSITION_MAX, None, decoded));
    Some(pieces)
}

/// The free blocks with a key, front first, each with its level.
pub fn write_levels(pool: &BlockPool) -> String {
    let free = pool.queue.iter().filter(|&block| pool.key(block).is_some());
    let level = |block| level_of(pool.kept(block), pool.now());
    listed(free.map(|block| format!("{}@{}", block.0, level(block))))
}

/// An engine's own hashes, one letter per hash.
pub fn read_hashes(word: &str) -> GivenHashes {
    word.bytes().map(|letter| Some([letter; HASH_SIZE])).collect()
}

/// Whether an operation was done.
pub fn read_done(word: &str) -> Result<bool, Failure> {
    match word {
        "done" => Ok(true),
        "failed" => Ok(false),
        _ => Err(Failure::Words),
    }
}

/// The number of a word.
pub fn number<T: std::str::FromStr>(word: &str) -> Result<T, Failure> {
    word.parse().map_err(|_| Failure::Words)
}

/// The ids of an append, its tokens (None if they are to come), and its options.
pub fn read_append<'a>(words: &'a [&'a str]) -> Result<Appending<'a>, Failure> {
    let (words, options) = match words.split_last() {
        Some((last, first)) if last.starts_with("batch=") => (first, &words[first.len()..]),
        _ => (words, &words[words.len()..]),
    };
    let parts = words.iter().map(|word| word.split_once('=').unwrap_or((word, "")));
    let (ids, tokens): (Vec<&str>, Vec<&str>) = parts.unzip();
    let known = tokens.iter().any(|token| !token.is_empty());
    let tokens = if known { Some(numbers(&tokens)?) } else { None };
    Ok((ids, tokens, options))
}

/// Ids, tokens, options.
pub type Appending<'a> = (Vec<&'a str>, Option<Vec<u32>>, &'a [&'a str]);

/// What a batch sampled, by its options in words.
pub fn read_output<'a>(tokens: Option<&'a [u32]>, options: &[&str]) -> Result<Output<'a>, Failure> {
    let mut output = Output { tokens, ..Output::default() };
    for option in options {
        match option.split_once('=') {
            Some(("rejected", value)) => output.num_rejected = number(value)?,
            Some(("batch", value)) => output.batch = Some(number(value)?),
            _ => return Err(Failure::Words),
        }
    }
    Ok(output)
}

/// The number of each word.
pub fn numbers<T: std::str::FromStr>(words: &[&str]) -> Result<Vec<T>, Failure> {
    words.iter().map(|word| number(word)).collect()
}

/// A value as it reads.
pub fn text(value: impl ToString) -> Called {
    Ok(Value::Text(value.to_string()))
}

/// The value of a call that gives none.
pub fn nothing(done: Result<(), Error>) -> Called {
    Ok(done.map(|()| Value::Nothing)?)
}

/// The value of a call that may be refused.
pub fn admitted<T>(given: Result<Admitted<T>, Error>, value: impl Fn(T) -> Value) -> Called {
    Ok(given?.map_or_else(Value::Refused, value))
}

/// The answer of `can_allocate`.
pub fn write_verdict(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Ok => "ok",
        Verdict::Later => "later",
        Verdict::Never => "never",
    }
}

/// The numbers of operations.
pub fn write_operations(operations: Vec<u32>) -> String {
    format!("operations {}", write_ids(operations))
}

/// The free queue of a pool, front first; empty without a pool.
pub fn write_queue(pool: Option<&BlockPool>) -> String {
    write_ids(pool.into_iter().flat_map(|pool| pool.queue.iter()).map(|block| block.0))
}

/// The blocks in quarantine, in the order of their release.
pub fn write_waiting(pool: Option<&BlockPool>) -> String {
    let quarantine = pool.and_then(|pool| pool.quarantine.as_ref());
    let waiting = quarantine.map_or_else(Vec::new, Quarantine::blocks);
    write_ids(waiting.into_iter().map(|block| block.0))
}

/// The blocks that have owners, each with their number.
pub fn write_owners(pool: &BlockPool) -> String {
    let counts = (0..pool.num_blocks()).map(|block| (block, pool.ref_count(BlockId(block))));
    listed(counts.filter(|(_, count)| *count > 0).map(|(b, count)| format!("{b}:{count}")))
}

/// Items with spaces between; `none` if there are none.
pub fn listed(items: impl Iterator<Item = String>) -> String {
    let items: Vec<String> = items.collect();
    if items.is_empty() { "none".to_owned() } else { items.join(" ") }
}
