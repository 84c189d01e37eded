// SPDX-License-Identifier: Apache-2.0
//! Numbers prefixes: equal numbers mean equal content, whatever the hashes are.
//!
//! No transition calls anything here. The keys and values of a position depend on the tokens up to
//! it, the adapter, and the media items or embedding in its place; the salt decides which requests
//! may share them, and so does the epoch if it is above 0. Together these are its identity.
//! A hash stands for one identity, that of the first request with it. All workers of a search share
//! one tree; each keeps the part that it has met, so that it seldom takes the lock. Twin:
//! kvcore/oracle/prefixes.py.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;
use smallvec::SmallVec;

use crate::state::state::{RequestState, State};
use crate::types::config::Config;
use crate::types::extra_inputs::{ExtraKeys, LoRA, MediaItem};
use crate::types::groups::Group;
use crate::types::keys::{BlockHash, Key};
use crate::types::violation::Violation;

/// The properties that this file checks.
pub const PREFIX_PROPERTIES: [&str; 3] = ["HASH-INJ", "KEY-SEP", "KEY-GRAN"];

/// What one position adds to a prefix: its token, or a number for it and what stands in its place.
pub type Letter = u32;
/// Numbers of a request's positions.
pub type Numbers = SmallVec<[u32; 16]>;

type Map<K, V> = HashMap<K, V, FxBuildHasher>;

/// Letters from here on stand for more than a token.
const FIRST_EXTRA: Letter = 1 << 31;

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
struct Extra {
    token: u32,
    lora: Option<(String, String)>,
    salt: Option<String>,
    media: Vec<(String, u32)>,
    row: Option<[u8; 32]>,
}

/// What all workers know together.
#[derive(Debug, Default)]
struct Tree {
    children: Map<(u32, Letter), u32>,
    /// By the numbers of prefixes and one less: the prefix one letter shorter.
    parents: Vec<u32>,
    chains: Map<BlockHash, Arc<Chain>>,
    /// By their numbers.
    hashes: Vec<BlockHash>,
    extras: Map<Extra, Letter>,
}

/// The tree of all prefixes seen so far, and the identity of each hash.
#[derive(Debug, Clone)]
pub struct Prefixes {
    hash_block_size: u32,
    block_sizes: Vec<u32>,
    /// Whether blocks of a group hold one state, not tokens.
    is_state: Vec<bool>,
    children: Map<(u32, Letter), u32>,
    parents: Vec<u32>,
    chains: Map<BlockHash, Arc<Chain>>,
    hashes: Vec<BlockHash>,
    /// Of the block that was asked for last, of an epoch above 0.
    of_epoch: Numbers,
    tree: Arc<Mutex<Tree>>,
}

impl Prefixes {
    /// A tree of the empty prefix. A clone is of the same tree, for another worker.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        Prefixes {
            hash_block_size: config.hash_block_size(),
            block_sizes: config.groups.iter().map(|group| group.block_size).collect(),
            is_state: config.groups.iter().map(Group::is_state).collect(),
            children: Map::default(),
            parents: Vec::new(),
            chains: Map::default(),
            hashes: Vec::new(),
            of_epoch: Numbers::new(),
            tree: Arc::default(),
        }
    }

    /// Return the number of the prefix that ends at each token and draft of a request. epoch: in
    /// which it began to compute.
    pub fn nodes(&mut self, request: &RequestState, epoch: u32) -> Numbers {
        let letters = self.letters(request);
        self.number_in(&letters, epoch)
    }

    /// What each token and draft of a request adds to its prefix.
    pub fn letters(&mut self, request: &RequestState) -> Numbers {
        let tokens = request.tokens.iter().chain(&request.drafts).copied();
        let Some(extra_keys) = &request.extra_keys else { return tokens.collect() };
        let all: Vec<u32> = tokens.collect();
        let extras = extras(&all, extra_keys, self.hash_block_size);
        extras.into_iter().map(|extra| self.letter(extra)).collect()
    }

    /// Take in what the requests' hashes stand for. Fails with HASH-INJ, KEY-SEP.
    pub fn learn(&mut self, state: &State) -> Result<(), Violation> {
        for request in state.requests() {
            if request.block_hashes.is_empty() {
                continue;
            }
            let letters = self.letters(request);
            let nodes = self.number(&letters);
            for (end, hash) in (1..).zip(&request.block_hashes) {
                let end = end * self.hash_block_size as usize;
                let known = match self.chains.get(hash) {
                    Some(known) => known,
                    None => self.meet(hash, &request.tokens[..end], &letters, &nodes),
                };
                if known.tokens.len() != end || known.last() != nodes[end - 1] {
                    return Err(collision(hash, known, &request.tokens[..end]));
                }
            }
        }
        Ok(())
    }

    /// What a block under a key ends. Fails with NOCRASH if no request had its hash.
    pub fn chain(&mut self, key: &Key) -> Result<&Chain, Violation> {
        let hash = key.block_hash();
        if !self.chains.contains_key(&hash) {
            let known = self.tree().chains.get(&hash).cloned();
            let Some(known) = known else {
                return Err(Violation::new("NOCRASH", "a key is of no known request".to_owned()));
            };
            self.chains.insert(hash, known);
        }
        Ok(&self.chains[&hash])
    }

    /// The number of a hash that some request carried.
    pub fn hash_number(&mut self, hash: &BlockHash) -> u32 {
        if let Some(known) = self.chains.get(hash) {
            return known.number;
        }
        self.tree().chains[hash].number
    }

    /// The hash of a number.
    pub fn hash_of(&mut self, number: u32) -> BlockHash {
        if number as usize >= self.hashes.len() {
            let hashes = self.tree().hashes.clone();
            self.hashes = hashes;
        }
        self.hashes[number as usize]
    }

    /// The prefixes that a block under a key of an epoch holds; a state is of one. Fails with
    /// KEY-GRAN.
    pub fn block(&mut self, key: &Key, epoch: u32) -> Result<&[u32], Violation> {
        let group_id = key.group_id();
        let is_state = self.is_state[group_id as usize];
        let size = if is_state { 1 } else { self.block_sizes[group_id as usize] };
        let chain = self.chain(key)?;
        let end = chain.end();
        if !end.is_multiple_of(size) {
            let detail =
                format!("a key of group {group_id} ends at token {end}, blocks hold {size}");
            return Err(Violation::new("KEY-GRAN", detail));
        }
        let first = end - size;
        if epoch == 0 {
            return Ok(&self.chain(key)?.nodes[first as usize..]);
        }
        let letters = chain.letters.clone();
        self.of_epoch = self.number_in(&letters, epoch);
        Ok(&self.of_epoch[first as usize..])
    }

    /// The prefixes that a block holds up to the end of a tail key of an epoch. Fails with
    /// KEY-GRAN.
    pub fn tail(&mut self, key: &Key, epoch: u32) -> Result<&[u32], Violation> {
        let group_id = key.group_id();
        let size = self.block_sizes[group_id as usize];
        let chain = self.chain(key)?;
        let (end, letters) = (chain.end(), chain.letters.clone());
        let num_inside = end % size;
        if num_inside == 0 || self.is_state[group_id as usize] {
            let detail =
                format!("a tail key of group {group_id} ends at token {end}, blocks hold {size}");
            return Err(Violation::new("KEY-GRAN", detail));
        }
        let first = (end - num_inside) as usize;
        if epoch == 0 {
            return Ok(&self.chain(key)?.nodes[first..]);
        }
        self.of_epoch = self.number_in(&letters, epoch);
        Ok(&self.of_epoch[first..])
    }

    /// The numbers of the prefixes that these letters make, one after the other.
    pub fn number(&mut self, letters: &[Letter]) -> Numbers {
        self.number_in(letters, 0)
    }

    /// The same, if they begin in an epoch.
    pub fn number_in(&mut self, letters: &[Letter], epoch: u32) -> Numbers {
        let mut node = if epoch == 0 { 0 } else { self.child(0, Letter::MAX - epoch) };
        let step = |&letter: &Letter| {
            node = self.child(node, letter);
            node
        };
        letters.iter().map(step).collect()
    }

    /// The numbers of the prefixes that lead to one, itself the last.
    pub fn path(&mut self, mut node: u32) -> Numbers {
        let mut path = Numbers::new();
        while node > 0 {
            path.push(node);
            if node as usize > self.parents.len() {
                let parents = self.tree().parents.clone();
                self.parents = parents;
            }
            node = self.parents[node as usize - 1];
        }
        path.reverse();
        path
    }

    fn child(&mut self, node: u32, letter: Letter) -> u32 {
        if let Some(&known) = self.children.get(&(node, letter)) {
            return known;
        }
        let mut tree = self.tree();
        let next = tree.children.len() as u32 + 1;
        let number = *tree.children.entry((node, letter)).or_insert(next);
        if number == next {
            tree.parents.push(node);
        }
        drop(tree);
        self.children.insert((node, letter), number);
        number
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

    /// What a hash stands for: what another worker knows, or else these tokens.
    fn meet(
        &mut self,
        hash: &BlockHash,
        tokens: &[u32],
        letters: &[Letter],
        nodes: &[u32],
    ) -> &Chain {
        let end = tokens.len();
        let mut tree = self.tree();
        let Tree { chains, hashes, .. } = &mut *tree;
        let known = chains.entry(*hash).or_insert_with(|| {
            hashes.push(*hash);
            Arc::new(Chain {
                tokens: tokens.to_vec(),
                letters: letters[..end].to_vec(),
                nodes: nodes[..end].to_vec(),
                number: hashes.len() as u32 - 1,
            })
        });
        let known = Arc::clone(known);
        drop(tree);
        self.chains.entry(*hash).or_insert(known)
    }

    fn tree(&self) -> MutexGuard<'_, Tree> {
        self.tree.lock().unwrap_or_else(PoisonError::into_inner)
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

fn collision(hash: &BlockHash, known: &Chain, tokens: &[u32]) -> Violation {
    let property = if known.tokens == tokens { "KEY-SEP" } else { "HASH-INJ" };
    let digits: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    Violation::new(property, format!("{digits} stands twice"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::state::make_state;
    use crate::transitions::requests::add_request;
    use crate::types::values::Request;

    #[test]
    fn equal_prefixes_have_equal_numbers_for_every_worker() {
        let config = Config::new(5, 2, b"seed");
        let mut state = make_state(config.clone()).unwrap();
        for (id, tokens) in [("0", [1, 2, 3]), ("1", [1, 2, 4])] {
            add_request(&mut state, Request::new(id, &tokens)).unwrap();
        }
        let mut prefixes = Prefixes::new(&config);
        let mut other = prefixes.clone();
        prefixes.learn(&state).unwrap();
        let requests: Vec<&RequestState> = state.requests().collect();
        let nodes = [prefixes.nodes(requests[0], 0), prefixes.nodes(requests[1], 0)];
        assert_eq!(nodes[0][..2], nodes[1][..2]);
        assert_ne!(nodes[0][2], nodes[1][2]);
        assert_eq!(other.nodes(requests[1], 0), nodes[1]);
        let key = requests[0].key(1, 0, 0);
        assert_eq!(other.block(&key, 0), Ok(&nodes[0][..2]));
    }

    #[test]
    fn a_hash_that_stands_for_two_prefixes_is_found() {
        let config = Config::new(5, 2, b"seed");
        let mut state = make_state(config.clone()).unwrap();
        let row = add_request(&mut state, Request::new("0", &[1, 2])).unwrap();
        let mut prefixes = Prefixes::new(&config);
        prefixes.learn(&state).unwrap();
        state[row].tokens[1] = 3;
        assert_eq!(prefixes.learn(&state).unwrap_err().property, "HASH-INJ");
    }
}
