//! Reads the offset maps of the Confluent Parallel Consumer, so that its groups can be taken over without
//! repeats.
//!
//! It has no check value: a text that was committed with another offset than the one it was made for cannot
//! be told, nor can all damage. Read it only for a group that this consumer wrote.

use std::io::Read;
use std::ops::Range;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ruzstd::decoding::StreamingDecoder;

use super::{DoneMap, Ignored, MAX_RANGES};

#[cfg(test)]
mod foreign_texts;

/// The most bytes that are read after decompression: more than [`MAX_RANGES`] ranges need in every encoding
/// but the bit set, and there enough for 33 million offsets.
pub const MAX_DECOMPRESSED: usize = 4 << 20;

/// The writer's default level uses 2 MiB.
const MAX_WINDOW: u64 = 8 << 20;

/// Reads the metadata of a commit of the offset `committed`, in each encoding that the library's versions up
/// to 0.5.3.3 can write. No metadata is an empty map.
///
/// Its map says for each offset up to the highest finished one whether it is unfinished; offsets that do
/// not exist count as finished there, and so they do here.
///
/// # Errors
/// [`Ignored`] if it is not such a map, if it says that the committed offset itself is finished (which is a
/// sign of a map for another offset), or if it exceeds [`MAX_DECOMPRESSED`] or [`MAX_RANGES`].
pub fn decode(committed: i64, metadata: &str) -> Result<DoneMap, Ignored> {
    if committed < 0 {
        return Err(Ignored::NoCommittedOffset { committed });
    }
    let mut map = DoneMap::new(committed);
    if metadata.is_empty() {
        return Ok(map);
    }
    let bytes = STANDARD.decode(metadata).map_err(|_| Ignored::Foreign)?;
    let Some((&magic, data)) = bytes.split_first() else {
        return Err(Ignored::Foreign);
    };
    match magic {
        b'l' => bit_set::<2>(data, &mut map),
        b'a' => bit_set::<2>(&decompress(data)?, &mut map),
        b'o' => bit_set::<4>(data, &mut map),
        b's' => bit_set::<4>(&decompress(data)?, &mut map),
        b'n' => run_lengths::<2>(data, &mut map),
        b'J' => run_lengths::<2>(&decompress(data)?, &mut map),
        b'e' => run_lengths::<4>(data, &mut map),
        b'p' => run_lengths::<4>(&decompress(data)?, &mut map),
        _ => return Err(Ignored::Foreign),
    }?;
    Ok(map)
}

fn decompress(data: &[u8]) -> Result<Vec<u8>, Ignored> {
    const BROKEN: Ignored = Ignored::Malformed { what: "the zstd frame is broken or too large" };
    let frame = StreamingDecoder::new_with_max_window_size(data, MAX_WINDOW).map_err(|_| BROKEN)?;
    let mut out = Vec::new();
    frame.take(MAX_DECOMPRESSED as u64 + 1).read_to_end(&mut out).map_err(|_| BROKEN)?;
    if out.len() > MAX_DECOMPRESSED {
        return Err(Ignored::TooLarge { limit: MAX_DECOMPRESSED });
    }
    Ok(out)
}

/// A signed number, the highest byte first, that must not be negative.
fn number<const WIDTH: usize>(bytes: [u8; WIDTH]) -> Result<i64, Ignored> {
    if bytes[0] >= 0x80 {
        return Err(Ignored::Malformed { what: "a length is negative" });
    }
    Ok(bytes.iter().fold(0, |value, &byte| value << 8 | i64::from(byte)))
}

/// The number of offsets, then a bit for each, in each byte the lowest first; set is finished.
fn bit_set<const WIDTH: usize>(data: &[u8], map: &mut DoneMap) -> Result<(), Ignored> {
    let Some((length, bytes)) = data.split_first_chunk::<WIDTH>() else {
        return Err(Ignored::Malformed { what: "the bit set has no length" });
    };
    let length = number(*length)?;
    // Bytes that are missing are zeros, and those beyond the length mean nothing.
    for (byte, first) in bytes.iter().zip((0..length).step_by(8)) {
        let mut at = first;
        let end = length.min(first + 8);
        while at < end {
            let finished = byte >> (at - first) & 1 == 1;
            let rest = if finished { !byte } else { *byte } >> (at - first);
            let next = (at + i64::from(rest.trailing_zeros())).min(end);
            if finished {
                append(map, at..next)?;
            }
            at = next;
        }
    }
    Ok(())
}

/// Lengths of runs in turn, the first one unfinished.
fn run_lengths<const WIDTH: usize>(data: &[u8], map: &mut DoneMap) -> Result<(), Ignored> {
    let (runs, rest) = data.as_chunks::<WIDTH>();
    if !rest.is_empty() {
        return Err(Ignored::Malformed { what: "a run length is cut off" });
    }
    let mut at = 0_i64;
    let mut finished = false;
    for run in runs {
        // So few runs fit into the bytes that the sum cannot exceed 2⁵¹.
        let next = at + number(*run)?;
        if finished && next > at {
            append(map, at..next)?;
        }
        at = next;
        finished = !finished;
    }
    Ok(())
}

/// Adds a range that is relative to the committed offset.
fn append(map: &mut DoneMap, range: Range<i64>) -> Result<(), Ignored> {
    if range.start == 0 {
        return Err(Ignored::Malformed {
            what: "the committed offset itself is marked as finished",
        });
    }
    let committed = map.committed();
    let (Some(start), Some(end)) =
        (committed.checked_add(range.start), committed.checked_add(range.end))
    else {
        return Err(Ignored::Malformed { what: "an offset is above the highest possible" });
    };
    if map.ranges().len() >= MAX_RANGES && map.end() != start {
        return Err(Ignored::TooManyRanges { limit: MAX_RANGES });
    }
    map.append(start..end);
    Ok(())
}
