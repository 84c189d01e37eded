// SPDX-License-Identifier: Apache-2.0
//! Extra inputs, which decide the content of blocks besides their tokens, and their extra keys.
//!
//! Invariants: a LoRA adapter and prompt embeddings mark every block, a media item the blocks that
//! contain its tokens, a cache salt the first block, from which the chain carries it on. A block's
//! keys come in the order LoRA, media by position, salt, embeddings, each under a tag of its kind,
//! so that equal values of two kinds differ. A media item that ends where a block starts is not in
//! the block (X-08); one in the block has its offset from the block's start, negative if it began
//! before. Items may overlap, as the sound and the pictures of a video do: a block has the keys of
//! all of them. If a cut ends items or rows inside a block, the block's keys have special tags and
//! give the position of the cut. Nothing is kept between blocks: a block's items are searched among
//! those that begin before its end. Twin: kvcore/types/extra_inputs.py.
//!
//! ```text
//! 1 LoRA             size of name[u32] name path
//! 2 media            offset from the block's start[i32] identifier
//! 3 cache salt       salt
//! 4 embeddings       SHA-256 of the bytes of the block's rows
//! 5 cut media        offset[i32] end from the block's start[u32] identifier
//! 6 cut embeddings   rows that are left[u32] SHA-256 of the bytes of the rows before the cut
//! ```
//!
//! Equal keys of blocks mean equal content, provided that an identifier stands for one content of
//! one length and that all rows have one size. Source: tests/core/hashing/test_key_contents.py.

use sha2::{Digest, Sha256};

use crate::types::keys::BlockHash;

/// Tag and value.
pub type ExtraKey = (u8, Vec<u8>);

/// The tag of a LoRA adapter.
pub const LORA: u8 = 1;
/// The tag of a media item.
pub const MEDIA: u8 = 2;
/// The tag of a cache salt.
pub const CACHE_SALT: u8 = 3;
/// The tag of prompt embeddings.
pub const PROMPT_EMBEDS: u8 = 4;
/// The tag of what a cut left of a media item.
pub const CUT_MEDIA: u8 = 5;
/// The tag of what a cut left of a block's prompt embeddings.
pub const CUT_EMBEDS: u8 = 6;
/// Most extra keys of a block.
pub const MAX_EXTRA_KEYS: usize = 255;
/// Most media items in one block, besides one key of each other kind.
pub const MAX_MEDIA: usize = MAX_EXTRA_KEYS - 3;

/// Prefix of the input of a hidden salt's digest.
const HIDDEN: &[u8] = b"kvcore salt\0";
pub(crate) const DIGEST_SIZE: usize = 32;

/// SHA-256 of the rows of one hash block.
pub type EmbedsDigest = [u8; DIGEST_SIZE];

/// An adapter: its name, and where its weights come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoRA {
    /// Not empty.
    pub name: String,
    /// May be empty.
    pub path: String,
}

/// An image, sound or video: a digest of its content, and where its tokens stand in the prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MediaItem {
    /// Not empty.
    pub identifier: String,
    /// Position of its first token.
    pub offset: u32,
    /// Its tokens, at least one.
    pub length: u32,
}

impl MediaItem {
    /// The position after its last token.
    #[must_use]
    pub fn end(&self) -> u64 {
        u64::from(self.offset) + u64::from(self.length)
    }
}

/// Embeddings that stand for a prompt's tokens, one row per token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptEmbeds<'a> {
    /// The rows, one after the other.
    pub data: &'a [u8],
    /// Bytes of a row, at least one.
    pub bytes_per_token: u32,
}

/// The extra keys of a request, checked.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ExtraKeys {
    /// The adapter.
    pub lora: Option<LoRA>,
    /// By first position.
    pub media: Vec<MediaItem>,
    /// Not empty.
    pub cache_salt: Option<String>,
    /// Digests of the rows of each hash block of the prompt, a last partial one included; empty
    /// if the prompt is not given as embeddings.
    pub embeds: Vec<EmbedsDigest>,
    /// Tokens that have a row.
    pub num_rows: u32,
    /// A cut ended the media items that reach furthest inside a hash block.
    pub media_cut: bool,
    /// A cut ended the rows inside a hash block.
    pub rows_cut: bool,
}

impl ExtraKeys {
    /// Whether no block of the request has any.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lora.is_none()
            && self.media.is_empty()
            && self.cache_salt.is_none()
            && self.embeds.is_empty()
    }

    /// Return the keys of the block of tokens [start, end), in order.
    ///
    /// block_size: tokens per hash block. A coarser block has the digests of all its hash blocks.
    #[must_use]
    pub fn of_block(&self, start: u32, end: u32, block_size: u32) -> Vec<ExtraKey> {
        let mut keys = Vec::new();
        self.each_of_block((start, end), block_size, |tag, parts| keys.push((tag, parts.concat())));
        keys
    }

    /// Return where a cut ended media items inside a hash block, if one did.
    #[must_use]
    pub fn media_cut_at(&self) -> Option<u64> {
        if self.media_cut { self.media.iter().map(MediaItem::end).max() } else { None }
    }

    /// Return the keys of a prompt that is cut to `num_tokens` tokens.
    ///
    /// Media and embeddings after the cut are dropped. A block that contains the cut never has its
    /// old key again, whatever tokens follow. A second cut gives the same result as if it were the
    /// only one.
    #[must_use]
    pub fn cut(&self, num_tokens: u32, block_size: u32) -> ExtraKeys {
        let inside = !num_tokens.is_multiple_of(block_size);
        let mut keys = self.clone();
        keys.media.retain(|item| item.offset < num_tokens);
        keys.media_cut &= keys.media.len() == self.media.len();
        for item in keys.media.iter_mut().filter(|item| item.end() > num_tokens.into()) {
            item.length = num_tokens - item.offset;
            keys.media_cut = inside;
        }
        keys.embeds.truncate(num_tokens.div_ceil(block_size) as usize);
        if num_tokens < self.num_rows {
            (keys.num_rows, keys.rows_cut) = (num_tokens, inside);
        }
        keys
    }

    /// Return these keys with a digest instead of the salt, for readers that may not see it.
    ///
    /// root: of the key chains. If it is secret, the digest does not help to guess the salt.
    #[must_use]
    pub fn hide_salt(&self, root: &BlockHash) -> ExtraKeys {
        let digest = |salt: &String| {
            let hash = Sha256::new().chain_update(HIDDEN).chain_update(root).chain_update(salt);
            hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
        };
        ExtraKeys { cache_salt: self.cache_salt.as_ref().map(digest), ..self.clone() }
    }

    /// Hand out the tag of each key of a block, and its value in parts.
    pub(crate) fn each_of_block(
        &self,
        (start, end): (u32, u32),
        block_size: u32,
        mut hand_out: impl FnMut(u8, &[&[u8]]),
    ) {
        if let Some(lora) = &self.lora {
            let size = (lora.name.len() as u32).to_le_bytes();
            hand_out(LORA, &[&size, lora.name.as_bytes(), lora.path.as_bytes()]);
        }
        let cut_at = self.media_cut_at();
        let begun = self.media.iter().take_while(|item| item.offset < end);
        for item in begun.filter(|item| item.end() > u64::from(start)) {
            let offset = item.offset.wrapping_sub(start).to_le_bytes();
            if Some(item.end()) == cut_at && item.end() < u64::from(end) {
                let end = (item.offset + item.length - start).to_le_bytes();
                hand_out(CUT_MEDIA, &[&offset, &end, item.identifier.as_bytes()]);
            } else {
                hand_out(MEDIA, &[&offset, item.identifier.as_bytes()]);
            }
        }
        if let (Some(salt), 0) = (&self.cache_salt, start) {
            hand_out(CACHE_SALT, &[salt.as_bytes()]);
        }
        if !self.embeds.is_empty() {
            for position in start / block_size..end / block_size {
                let cut = self.rows_cut && position as usize == self.embeds.len() - 1;
                match self.embeds.get(position as usize) {
                    Some(digest) if cut => {
                        let num_left = self.num_rows - position * block_size;
                        hand_out(CUT_EMBEDS, &[&num_left.to_le_bytes(), digest]);
                    }
                    Some(digest) => hand_out(PROMPT_EMBEDS, &[digest]),
                    None => hand_out(PROMPT_EMBEDS, &[&digest_of(&[])]),
                }
            }
        }
    }
}

/// Those of most requests.
pub(crate) static NO_EXTRA_KEYS: ExtraKeys = ExtraKeys {
    lora: None,
    media: Vec::new(),
    cache_salt: None,
    embeds: Vec::new(),
    num_rows: 0,
    media_cut: false,
    rows_cut: false,
};

/// What a request brings of extra keys. LoRA, media and embeddings are well-formed in themselves.
#[derive(Debug, Clone, Default)]
pub struct GivenKeys<'a> {
    /// The adapter.
    pub lora: Option<LoRA>,
    /// In any order.
    pub media: Vec<MediaItem>,
    /// The salt.
    pub cache_salt: Option<&'a str>,
    /// The prompt's embeddings.
    pub prompt_embeds: Option<PromptEmbeds<'a>>,
}

/// Whether the value of an extra key has the form of its tag.
pub(crate) fn is_extra_key(tag: u8, value: &[u8]) -> bool {
    let is_text = |value: &[u8]| std::str::from_utf8(value).is_ok();
    match tag {
        LORA => value.split_first_chunk().is_some_and(|(size, text)| {
            let name = text.split_at_checked(u32::from_le_bytes(*size) as usize);
            name.is_some_and(|(name, path)| !name.is_empty() && is_text(name) && is_text(path))
        }),
        MEDIA => value.len() > 4 && is_text(&value[4..]),
        CACHE_SALT => !value.is_empty() && is_text(value),
        CUT_MEDIA => value.len() > 8 && is_text(&value[8..]),
        CUT_EMBEDS => value.len() == 4 + DIGEST_SIZE,
        _ => tag == PROMPT_EMBEDS && value.len() == DIGEST_SIZE,
    }
}

pub(crate) fn digest_of(rows: &[u8]) -> EmbedsDigest {
    Sha256::digest(rows).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(identifier: &str, offset: u32, length: u32) -> MediaItem {
        MediaItem { identifier: identifier.to_owned(), offset, length }
    }

    fn media(items: &[MediaItem]) -> ExtraKeys {
        ExtraKeys { media: items.to_vec(), ..ExtraKeys::default() }
    }

    #[test]
    fn a_media_item_is_in_the_blocks_that_have_its_tokens() {
        // Tokens 2 to 7 are an image, blocks have 4 tokens: it ends where the third starts.
        let keys = media(&[item("i", 2, 6)]);
        assert_eq!(keys.of_block(0, 4, 4), [(MEDIA, b"\x02\0\0\0i".to_vec())]);
        assert_eq!(keys.of_block(4, 8, 4), [(MEDIA, b"\xfe\xff\xff\xffi".to_vec())]);
        assert_eq!(keys.of_block(8, 12, 4), []);
    }

    #[test]
    fn a_key_has_the_form_of_its_tag() {
        assert!(is_extra_key(CACHE_SALT, b"s"));
        assert!(!is_extra_key(CACHE_SALT, b""));
        assert!(is_extra_key(LORA, b"\x01\0\0\0ab"));
        assert!(!is_extra_key(LORA, b"\x01\0\0\0a\xff") && !is_extra_key(LORA, b"\x01\0\0\0\xffb"));
        assert!(is_extra_key(CUT_EMBEDS, &[0; 4 + DIGEST_SIZE]));
        assert!(!is_extra_key(CUT_EMBEDS, &[0; 3 + DIGEST_SIZE]));
    }

    #[test]
    fn a_cut_takes_media_and_digests_behind_it() {
        let embeds = [b"a", b"b", b"c"].map(|rows| digest_of(rows)).to_vec();
        let media_of = media(&[item("i", 1, 4), item("j", 5, 2)]);
        let whole = ExtraKeys { embeds, num_rows: 6, ..media_of };
        let cut = whole.cut(4, 2);
        assert_eq!((&cut.media[..], cut.media_cut), (&[item("i", 1, 3)][..], false));
        assert_eq!((&cut.embeds[..], cut.rows_cut), (&whole.embeds[..2], false));
        assert_eq!(
            (whole.cut(7, 2), whole.cut(6, 2).embeds),
            (whole.clone(), whole.embeds.clone())
        );
        // Through a block: what is left of it has tags of its own, and says where it ends.
        let cut = whole.cut(3, 2);
        assert_eq!(cut.of_block(0, 2, 2), whole.of_block(0, 2, 2));
        let rest = [(CUT_MEDIA, b"\xff\xff\xff\xff\x01\0\0\0i".to_vec())];
        assert_eq!(cut.of_block(2, 4, 2)[..1], rest);
        let digest = [b"\x01\0\0\0", &whole.embeds[1][..]].concat();
        assert_eq!(cut.of_block(2, 4, 2)[1..], [(CUT_EMBEDS, digest)]);
        assert_eq!(whole.cut(5, 2).cut(3, 2), cut);
        assert_eq!(cut.cut(2, 2), whole.cut(2, 2));
    }
}
