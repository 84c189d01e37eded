// SPDX-License-Identifier: Apache-2.0
//! How traces write tokens, keys, commands, events and values.
//!
//! One line states one thing; consecutive commands of one kind (and, for table changes, of one row
//! and group) share a line. A content key is written as the tokens of its prefix in parentheses,
//! then its extra keys after `;`, then `@group` in every group except the first.
//! Twin: kvcore/trace/text.py.

use std::collections::HashMap;
use std::fmt::Display;

use crate::state::state::{NO_HOST_BLOCK, State};
use crate::types::commands::Command;
use crate::types::errors::{Error, Field};
use crate::types::events::Event;
use crate::types::extra_inputs::ExtraKeys;
use crate::types::keys::{BlockHash, Key};
use crate::types::values::{
    Appended, Hit, KVCacheBlocks, PrefixCacheStats, Reason, Refused, Swapped,
};

/// The prefix that each block hash stands for, learnt from requests.
#[derive(Debug, Default)]
pub struct TraceNames {
    prefixes: HashMap<BlockHash, String>,
}

impl TraceNames {
    /// Learn the hashes of all requests of a state.
    pub fn learn(&mut self, state: &State) {
        let size = state.hash_block_size as usize;
        for request in state.requests() {
            for (hash, end) in request.block_hashes.iter().zip((size..).step_by(size)) {
                let marks = || write_marks(request.extra_keys(), end as u32);
                let name = || format!("({}{})", write_tokens(&request.tokens[..end]), marks());
                self.prefixes.entry(*hash).or_insert_with(name);
            }
        }
    }

    /// Write the prefix of a block hash.
    pub fn block_hash(&self, hash: &BlockHash) -> &str {
        &self.prefixes[hash]
    }

    /// Write the prefix of a key, and its group unless that is the first.
    pub fn key(&self, key: &Key) -> String {
        let prefix = self.block_hash(&key.block_hash());
        if key.group_id() == 0 { prefix.to_owned() } else { format!("{prefix}@{}", key.group_id()) }
    }
}

/// Most tokens of one word, since the tokens of a trace are held in memory.
const TOKENS_MAX: u64 = 1 << 16;

/// The tokens of `0-9,100`, at most TOKENS_MAX. None: the text has another form.
pub fn read_tokens(text: &str) -> Option<Vec<u32>> {
    let mut tokens = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        let count = (u64::from(last) + 1).saturating_sub(u64::from(first));
        if tokens.len() as u64 + count > TOKENS_MAX {
            return None;
        }
        tokens.extend(first..=last);
    }
    Some(tokens)
}

/// Write the shortest text that `read_tokens` reads as these tokens.
pub fn write_tokens(tokens: &[u32]) -> String {
    let runs = tokens.chunk_by(|before, after| before.checked_add(1) == Some(*after));
    let write = |run: &[u32]| match run {
        [first, .., last] => format!("{first}-{last}"),
        _ => run[0].to_string(),
    };
    runs.map(write).collect::<Vec<_>>().join(",")
}

/// Write the extra keys of a prefix, each after `;`.
pub fn write_marks(extra_keys: &ExtraKeys, num_tokens: u32) -> String {
    let mut marks = String::new();
    if let Some(lora) = &extra_keys.lora {
        marks += &format!(";lora={}", lora.name);
    }
    for item in extra_keys.media.iter().filter(|item| item.offset < num_tokens) {
        let cut = Some(item.end()) == extra_keys.media_cut_at();
        let kind = if cut && item.end() < num_tokens.into() { "cut-media" } else { "media" };
        marks += &format!(";{kind}={}@{}+{}", item.identifier, item.offset, item.length);
    }
    if let Some(salt) = &extra_keys.cache_salt {
        marks += &format!(";salt={salt}");
    }
    if !extra_keys.embeds.is_empty() {
        let cut = extra_keys.rows_cut && extra_keys.num_rows < num_tokens;
        let rows =
            if cut { format!(";cut-embeds={}", extra_keys.num_rows) } else { ";embeds".into() };
        marks += &rows;
    }
    marks
}

/// Write block ids in order, `null` for the null block; `none` for an empty list.
pub fn write_ids(ids: impl IntoIterator<Item = u32>) -> String {
    let write = |id: u32| if id == NO_HOST_BLOCK.0 { "null".to_owned() } else { id.to_string() };
    let listed: Vec<String> = ids.into_iter().map(write).collect();
    if listed.is_empty() { "none".to_owned() } else { join(&listed, " ") }
}

/// Write the block ids of all groups.
pub fn write_blocks(blocks: &KVCacheBlocks) -> String {
    join(&blocks.get_block_ids().into_iter().map(write_ids).collect::<Vec<_>>(), " | ")
}

/// What a call gave back.
#[derive(Debug)]
pub enum Value {
    /// No output.
    Nothing,
    /// Yes or no.
    Flag(bool),
    /// Blocks.
    Blocks(KVCacheBlocks),
    /// A cached prefix.
    Hit(Hit),
    /// A refusal.
    Refused(Refused),
    /// What a swap moved.
    Swapped(Swapped),
    /// How far an append came.
    Appended(Appended),
    /// Statistics.
    Stats(PrefixCacheStats),
    /// Anything else, as it reads.
    Text(String),
}

/// The lines of what a call gave back; none for nothing.
pub fn write_value(value: &Value) -> Vec<String> {
    let line = match value {
        Value::Nothing => return Vec::new(),
        Value::Flag(true) => "yes".to_owned(),
        Value::Flag(false) => "no".to_owned(),
        Value::Blocks(blocks) => format!("blocks {}", write_blocks(blocks)),
        Value::Hit(hit) => {
            let found = format!("hit {}, {} tokens", write_blocks(&hit.blocks), hit.num_tokens);
            match hit.num_common > hit.num_tokens {
                true => format!("{found}, {} without states", hit.num_common),
                false => found,
            }
        }
        Value::Refused(refused) => write_refused(refused),
        Value::Swapped(Swapped { num_copied, num_found }) => {
            format!("swapped: copied {num_copied} found {num_found}")
        }
        Value::Appended(Appended { done, refused: None, .. }) => format!("done {done}"),
        Value::Appended(Appended { done, refused: Some(refused), .. }) => {
            format!("done {done}, {}", write_refused(refused))
        }
        Value::Stats(stats) => {
            let write = |requests, queries, hits| {
                format!("requests {requests} queries {queries} hits {hits}")
            };
            let fresh = write(stats.requests, stats.queries, stats.hits);
            let again = (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits);
            let preempted = write(again.0, again.1, again.2);
            return vec![format!("= {fresh}"), format!("= preempted {preempted}")];
        }
        Value::Text(text) => text.clone(),
    };
    vec![format!("= {line}")]
}

/// Write a refusal with its numbers.
pub fn write_refused(refused: &Refused) -> String {
    let Refused { reason, needed, available, pending } = refused;
    let reason = if *reason == Reason::Later { "later" } else { "never" };
    let pending = if *pending == 0 { String::new() } else { format!(" pending {pending}") };
    format!("refused {reason}: needed {needed} available {available}{pending}")
}

/// Write the line of a misuse, with its fields in the order in which the error names them.
pub fn write_error(error: &Error) -> Vec<String> {
    let fields = error.fields().into_iter();
    let written = fields.map(|(name, value)| format!(" {name}={}", write_field(&value)));
    vec![format!("= error {}{}", error.name(), written.collect::<String>())]
}

/// Write one field of an error; a list as its items with commas.
pub fn write_field(value: &Field) -> String {
    match value {
        Field::Ints(items) => join(items, ","),
        Field::Texts(items) => join(items, ","),
        other => other.to_string(),
    }
}

/// Write the lines of commands, in order.
pub fn write_commands(commands: &[Command], names: &TraceNames) -> Vec<String> {
    let runs = commands.chunk_by(|before, after| head(before) == head(after));
    let write = |run: &[Command]| {
        let items: Vec<String> = run.iter().map(|command| item(command, names)).collect();
        format!("! {} {}", head(&run[0]), items.join(" ")).trim_end().to_owned()
    };
    runs.map(write).collect()
}

fn head(command: &Command) -> String {
    let name = command.name();
    match command {
        Command::Free { cached: true, .. } => format!("{name} cached"),
        Command::SetTable { row, group_id, .. } | Command::CutTable { row, group_id, .. } => {
            format!("{name} row {}{}:", row.0, of(*group_id))
        }
        _ => name.to_owned(),
    }
}

fn item(command: &Command, names: &TraceNames) -> String {
    match command {
        Command::Allocate { block }
        | Command::Touch { block }
        | Command::Free { block, .. }
        | Command::Zero { block } => block.0.to_string(),
        Command::Evict { block, key } => format!("{}{}", block.0, names.key(key)),
        Command::EvictAll => String::new(),
        Command::CopyOnWrite { source, target } => format!("{}>{}", source.0, target.0),
        Command::SwapOut { block, host_block } => format!("{}>host:{}", block.0, host_block.0),
        Command::SwapIn { host_block, block } => format!("host:{}>{}", host_block.0, block.0),
        Command::Store { operation, block, key } => {
            format!("{operation}:{}{}", block.0, names.key(key))
        }
        Command::Load { operation, key, block } => {
            format!("{operation}:{}>{}", names.key(key), block.0)
        }
        Command::SetTable { position, block, .. } => format!("{position}={}", block.0),
        Command::CutTable { length, .. } => length.to_string(),
    }
}

/// Write the lines of events, in order.
pub fn write_events(events: &[Event], names: &TraceNames) -> Vec<String> {
    events.iter().map(|event| format!("* {}", write_event(event, names))).collect()
}

fn write_event(event: &Event, names: &TraceNames) -> String {
    match event {
        Event::BlockStored { block_hashes, parent_hash, tokens, group_id, epoch, .. } => {
            let stored: Vec<&str> =
                block_hashes.iter().map(|hash| names.block_hash(hash)).collect();
            let parent =
                parent_hash.as_ref().map(|hash| format!(" after {}", names.block_hash(hash)));
            let (after, tokens) = (parent.unwrap_or_default(), write_tokens(tokens));
            let epoch = if *epoch == 0 { String::new() } else { format!(" epoch {epoch}") };
            format!("stored {}{after} tokens {tokens}{}{epoch}", stored.join(" "), of(*group_id))
        }
        Event::BlockRemoved { block_hash, group_id } => {
            format!("removed {}{}", names.block_hash(block_hash), of(*group_id))
        }
        Event::AllBlocksCleared => "cleared".to_owned(),
    }
}

/// A group, unless it is the first.
fn of(group_id: u32) -> String {
    if group_id == 0 { String::new() } else { format!(" group {group_id}") }
}

fn join(items: &[impl Display], between: &str) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(between)
}
