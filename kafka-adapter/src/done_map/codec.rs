//! The format, version 1; `docs/src/done-map.md` describes it.

use std::ops::Range;

use super::bits::{BitReader, BitWriter, PARAMETERS, rice_bits};
use super::{Cut, DoneMap, Ignored, MAX_RANGES, text};

/// Begins every map. No base64 text begins so.
const MARK: u8 = b'~';
const VERSION: u8 = b'1';
const PREFIX: usize = 2;
const CHECK: usize = 4;

const KIND_BITS: u32 = 2;
const PARAMETER_BITS: u32 = 4;
/// Each token is one range.
const PLAIN: u64 = 0;
/// Each token is one range and how often the same one follows again.
const REPEATS: u64 = 1;

/// What a budget for bits takes of a map, and how it is written.
#[derive(Debug, Clone, Copy)]
struct Plan {
    repeats: bool,
    parameters: [u32; 3],
    ranges: usize,
    bits: u64,
}

/// The bits that one stream of values takes with each parameter.
#[derive(Debug, Clone, Copy, Default)]
struct Sums([u64; PARAMETERS]);

impl Sums {
    fn add(&mut self, value: u64) {
        for (k, sum) in (0..).zip(&mut self.0) {
            *sum += rice_bits(value, k);
        }
    }

    fn replace(&mut self, old: u64, new: u64) {
        for (k, sum) in (0..).zip(&mut self.0) {
            *sum = *sum + rice_bits(new, k) - rice_bits(old, k);
        }
    }

    /// The least bits and the parameter that gives them.
    fn least(&self) -> (u64, u32) {
        (0..).zip(self.0).map(|(k, sum)| (sum, k)).min().unwrap_or_default()
    }
}

/// The sums over the first ranges of a map. Their least only grows with each further range.
#[derive(Debug, Clone, Copy, Default)]
struct State {
    ranges: usize,
    gaps: Sums,
    runs: Sums,
    counts: Sums,
    last: Option<(u64, u64)>,
    again: u64,
}

impl State {
    fn add(&mut self, token: (u64, u64), repeats: bool) {
        self.ranges += 1;
        if repeats {
            if self.last == Some(token) {
                self.counts.replace(self.again, self.again + 1);
                self.again += 1;
                return;
            }
            self.last = Some(token);
            self.again = 0;
            self.counts.add(0);
        }
        self.gaps.add(token.0);
        self.runs.add(token.1);
    }

    fn plan(&self, repeats: bool) -> Plan {
        let (gaps, for_gaps) = self.gaps.least();
        let (runs, for_runs) = self.runs.least();
        let mut bits = u64::from(KIND_BITS + 2 * PARAMETER_BITS) + gaps + runs;
        let mut for_counts = 0;
        if repeats {
            let (counts, parameter) = self.counts.least();
            for_counts = parameter;
            bits += u64::from(PARAMETER_BITS) + counts;
        }
        Plan { repeats, parameters: [for_gaps, for_runs, for_counts], ranges: self.ranges, bits }
    }
}

/// The values of each range: unfinished offsets before it and offsets in it, both less one.
fn tokens(map: &DoneMap, ranges: usize) -> impl Iterator<Item = (u64, u64)> {
    let mut end = map.committed();
    map.ranges()[..ranges].iter().map(move |range| {
        let gap = range.start.abs_diff(end) - 1;
        end = range.end;
        (gap, range.end.abs_diff(range.start) - 1)
    })
}

/// The longest beginning of the map that one kind brings into the budget.
fn plan_kind(map: &DoneMap, budget: u64, repeats: bool) -> Plan {
    // The least over the parameters is looked for once a block, and range by range in the block where the
    // budget ends.
    const BLOCK: usize = 64;
    let ranges = map.ranges().len().min(MAX_RANGES);
    let mut tokens = tokens(map, ranges);
    let mut state = State::default();
    while state.ranges < ranges {
        let before = state;
        let block: [_; BLOCK] = std::array::from_fn(|_| tokens.next());
        let block = block.iter().flatten();
        block.clone().for_each(|&token| state.add(token, repeats));
        if state.plan(repeats).bits > budget {
            state = before;
            for &token in block {
                let mut next = state;
                next.add(token, repeats);
                if next.plan(repeats).bits > budget {
                    break;
                }
                state = next;
            }
            break;
        }
    }
    state.plan(repeats)
}

/// Prefers what keeps more ranges, and then what is shorter.
fn plan(map: &DoneMap, budget: u64) -> Plan {
    let plain = plan_kind(map, budget, false);
    let repeats = plan_kind(map, budget, true);
    if (repeats.ranges, plain.bits) > (plain.ranges, repeats.bits) { repeats } else { plain }
}

fn text_len(plan: &Plan) -> usize {
    if plan.ranges == 0 {
        return 0;
    }
    // More bits than memory has cannot be: each range is in memory already.
    PREFIX + text::len(CHECK + plan.bits.div_ceil(8) as usize)
}

/// The bits of the body that a text of `limit` bytes has room for.
pub(super) fn budget(limit: usize) -> u64 {
    // Far above every broker's limit, and far below what could overflow.
    let limit = limit.min(1 << 28);
    let payload = text::capacity(limit.saturating_sub(PREFIX));
    payload.saturating_sub(CHECK) as u64 * 8
}

/// Bits of the header of the plain kind.
pub(super) const PLAIN_HEADER_BITS: u64 = (KIND_BITS + 2 * PARAMETER_BITS) as u64;

pub(super) fn encoded_len(map: &DoneMap) -> usize {
    text_len(&plan(map, u64::MAX))
}

fn check(committed: i64, body: &[u8]) -> [u8; CHECK] {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&[MARK, VERSION]);
    hasher.update(&committed.to_be_bytes());
    hasher.update(body);
    // The lowest byte first and at the end: so a damaged character stays one burst for the check.
    hasher.finalize().to_le_bytes()
}

/// Replaces `out` by the text; `body` is scratch space.
pub(super) fn encode(map: &DoneMap, limit: usize, body: &mut Vec<u8>, out: &mut String) -> Cut {
    out.clear();
    let plan = plan(map, budget(limit));
    if plan.ranges > 0 {
        out.reserve(text_len(&plan));
        write_body(map, &plan, body);
        out.push(char::from(MARK));
        out.push(char::from(VERSION));
        text::encode(body.iter().chain(&check(map.committed(), body)), out);
    }
    let (kept, cut) = map.ranges().split_at(plan.ranges);
    Cut {
        kept_ranges: kept.len(),
        cut_ranges: cut.len(),
        cut_offsets: cut.iter().map(|range| range.end.abs_diff(range.start)).sum(),
        from: cut.first().map(|range| range.start),
    }
}

fn write_body(map: &DoneMap, plan: &Plan, body: &mut Vec<u8>) {
    body.clear();
    let mut bits = BitWriter::new(body);
    let [for_gaps, for_runs, for_counts] = plan.parameters;
    bits.bits(if plan.repeats { REPEATS } else { PLAIN }, KIND_BITS);
    bits.bits(for_gaps.into(), PARAMETER_BITS);
    bits.bits(for_runs.into(), PARAMETER_BITS);
    if plan.repeats {
        bits.bits(for_counts.into(), PARAMETER_BITS);
    }
    let mut tokens = tokens(map, plan.ranges).peekable();
    while let Some(token) = tokens.next() {
        bits.rice(token.0, for_gaps);
        bits.rice(token.1, for_runs);
        if plan.repeats {
            let mut again = 0;
            while tokens.next_if_eq(&token).is_some() {
                again += 1;
            }
            bits.rice(again, for_counts);
        }
    }
    bits.finish();
}

pub(super) fn decode(committed: i64, metadata: &str) -> Result<DoneMap, Ignored> {
    if committed < 0 {
        return Err(Ignored::NoCommittedOffset { committed });
    }
    let mut map = DoneMap::new(committed);
    let payload = match metadata.as_bytes() {
        [] => return Ok(map),
        [MARK, VERSION, payload @ ..] => payload,
        [MARK, ..] => {
            return Err(Ignored::UnknownVersion { version: metadata.chars().nth(1) });
        }
        _ => return Err(Ignored::Foreign),
    };
    let payload =
        text::decode(payload).map_err(|at| Ignored::BadCharacter { position: PREFIX + at })?;
    let Some((body, found)) = payload.split_last_chunk::<CHECK>() else {
        return Err(Ignored::TooShort { bytes: metadata.len() });
    };
    if *found != check(committed, body) {
        return Err(Ignored::CheckFailed { committed });
    }
    read_body(body, &mut map)?;
    Ok(map)
}

fn read_body(body: &[u8], map: &mut DoneMap) -> Result<(), Ignored> {
    const ENDED: Ignored = Ignored::Malformed { what: "the bits end inside of a value" };
    let mut bits = BitReader::new(body);
    let kind = bits.bits(KIND_BITS).ok_or(ENDED)?;
    if kind > REPEATS {
        return Err(Ignored::Malformed { what: "the kind is unknown" });
    }
    let mut parameter = || bits.bits(PARAMETER_BITS).map(|k| k as u32).ok_or(ENDED);
    let for_gaps = parameter()?;
    let for_runs = parameter()?;
    let for_counts = if kind == REPEATS { parameter()? } else { 0 };
    while !bits.at_end() {
        let gap = bits.rice(for_gaps).ok_or(ENDED)?;
        let run = bits.rice(for_runs).ok_or(ENDED)?;
        let again = if kind == REPEATS { bits.rice(for_counts).ok_or(ENDED)? } else { 0 };
        if again >= (MAX_RANGES - map.ranges().len()) as u64 {
            return Err(Ignored::TooManyRanges { limit: MAX_RANGES });
        }
        for _ in 0..=again {
            let range = next_range(map.end(), gap, run)
                .ok_or(Ignored::Malformed { what: "an offset is above the highest possible" })?;
            map.append(range);
        }
    }
    Ok(())
}

fn next_range(end: i64, gap: u64, run: u64) -> Option<Range<i64>> {
    let start = end.checked_add_unsigned(gap)?.checked_add(1)?;
    let end = start.checked_add_unsigned(run)?.checked_add(1)?;
    Some(start..end)
}
