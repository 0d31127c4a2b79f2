//! Round trips, limits, damaged and foreign texts.

use std::collections::BTreeSet;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const REASONABLE: i64 = 1 << 40;

fn map_of(committed: i64, ranges: impl IntoIterator<Item = (u64, u64)>) -> DoneMap {
    let mut map = DoneMap::new(committed);
    for (gap, run) in ranges {
        let Some(start) = map.end().checked_add_unsigned(gap.max(1)) else { break };
        let Some(end) = start.checked_add_unsigned(run.max(1)) else { break };
        map.push_range(start..end).unwrap();
    }
    map
}

fn encode(map: &DoneMap) -> String {
    Encoder::new().encode(map).to_owned()
}

/// Small numbers mostly, so that tokens repeat, and now and then a huge one.
fn length() -> impl Strategy<Value = u64> {
    prop_oneof![
        6 => 1_u64..3,
        3 => 1_u64..200,
        1 => 1_u64..1 << 36,
        1 => (0_u32..63).prop_map(|bits| 1 << bits),
    ]
}

fn base() -> impl Strategy<Value = i64> {
    prop_oneof![
        0_i64..1_000,
        0..=i64::MAX - 1,
        Just(i64::MAX - 1),
        (0_i64..500).prop_map(|below| i64::MAX - 1 - below)
    ]
}

fn any_map(ranges: usize) -> impl Strategy<Value = DoneMap> {
    let pieces = prop_oneof![
        vec((length(), length()), 0..ranges),
        // Stretches of the same token.
        vec(((length(), length()), 1_usize..40), 0..ranges / 20 + 2).prop_map(|stretches| {
            stretches
                .into_iter()
                .flat_map(|(token, times)| std::iter::repeat_n(token, times))
                .collect()
        }),
    ];
    (base(), pieces).prop_map(|(base, pieces)| map_of(base, pieces))
}

/// A number below the given one.
type Random<'a> = &'a mut dyn FnMut(u64) -> u64;

/// The windows of the table in `docs/src/done-map.md`.
fn windows() -> Vec<(&'static str, DoneMap)> {
    let mut state = 0x2545_F491_4F6C_DD1D_u64;
    let mut random = move |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) % below
    };
    let mut window = |done: &mut dyn FnMut(i64, Random<'_>) -> bool| {
        let mut map = DoneMap::new(0);
        for offset in 1..100_000 {
            if done(offset, &mut random) {
                map.push(offset).unwrap();
            }
        }
        map
    };
    vec![
        ("one stuck, the rest done", window(&mut |_, _| true)),
        ("every second done", window(&mut |offset, _| offset % 2 == 1)),
        ("1 in 1,000 unfinished", window(&mut |_, random| random(1_000) != 0)),
        ("1 in 100 unfinished", window(&mut |_, random| random(100) != 0)),
        ("1 in 10 unfinished", window(&mut |_, random| random(10) != 0)),
        ("random half done", window(&mut |_, random| random(2) == 0)),
        ("1 in 100 done", window(&mut |_, random| random(100) == 0)),
    ]
}

fn varint(mut value: u64) -> usize {
    let mut bytes = 1;
    while value >= 128 {
        value >>= 7;
        bytes += 1;
    }
    bytes
}

/// Bytes of the simple encodings that the table compares with: run lengths of 7 bits a byte, and bits.
fn simple(map: &DoneMap) -> (usize, usize) {
    let mut end = map.committed();
    let mut runs = 0;
    for range in map.ranges() {
        runs +=
            varint((range.start - end - 1) as u64) + varint((range.end - range.start - 1) as u64);
        end = range.end;
    }
    (runs, ((map.end() - map.committed()) as usize).div_ceil(8))
}

/// Prints the table of the book: `cargo test -p plimsoll-kafka --lib sizes_of_encodings -- --nocapture`.
#[test]
fn sizes_of_encodings() {
    for (name, map) in windows() {
        let used = map.encoded_len();
        let (runs, bits) = simple(&map);
        let base64 = |bytes: usize| (bytes * 4).div_ceil(3);
        let kept = Encoder::new().encode_within(&map, DEFAULT_LIMIT).1;
        let kept = map.ranges()[..kept.kept_ranges].last().map_or(0, |range| range.end);
        println!("| {name} | {used} | {} | {} | {kept} |", base64(runs), base64(bits));
        // The check and the header are at most 9 characters; no simple encoding may win by more.
        assert!(
            used <= text::len(runs.min(bits)) + 16,
            "{name}: {used} for {runs} and {bits} bytes"
        );
    }
}

#[test]
fn ranges_are_kept_in_order_and_joined() {
    let mut map = DoneMap::new(10);
    map.push_range(12..14).unwrap();
    map.push(14).unwrap();
    map.push_range(20..20).unwrap();
    map.push(16).unwrap();
    assert_eq!(map.ranges(), [12..15, 16..17]);
    assert_eq!((map.len(), map.end(), map.is_empty()), (4, 17, false));
    assert_eq!(map.push(16), Err(OutOfOrder { start: 16, lowest: 17 }));
    assert_eq!(DoneMap::new(10).push(10), Err(OutOfOrder { start: 10, lowest: 11 }));
    assert!(DoneMap::new(10).push(i64::MAX).is_err());
    assert!(DoneMap::new(i64::MAX).push_range(i64::MAX - 1..i64::MAX).is_err());
    let finished: Vec<_> = (0..30).filter(|&offset| map.contains(offset)).collect();
    assert_eq!(finished, [12, 13, 14, 16]);
    map.reset(3);
    assert_eq!(map, DoneMap::new(3));
    assert_eq!(encode(&map), "");
}

/// Bit by bit by hand, as the book describes it: a change of the format needs a new version.
#[test]
fn format_is_the_one_of_the_book() {
    // Committed 500; 502, 503, 505 finished: gap 2, run 2, gap 1, run 1. Kind 00, parameters 0000 0000,
    // then 10 10 0 0, filled up with ones.
    let body = [0b0000_0000, 0b0010_1000];
    let mut map = DoneMap::new(500);
    map.push_range(502..504).unwrap();
    map.push(505).unwrap();
    let mut checked = b"~1".to_vec();
    checked.extend(500_i64.to_be_bytes());
    checked.extend(body);
    let mut payload = body.to_vec();
    payload.extend(crc32fast::hash(&checked).to_le_bytes());
    let mut expected = "~1".to_owned();
    text::encode(payload.iter(), &mut expected);
    assert_eq!(encode(&map), expected);
    assert_eq!(expected, BOOK_PLAIN);

    // Committed 0; 1, 3, 5 .. 199 finished: one token that comes 99 times again.
    let map = map_of(0, std::iter::repeat_n((1, 1), 100));
    assert_eq!(encode(&map), BOOK_REPEATS);
}

const BOOK_PLAIN: &str = "~1!(+t?w3t";
const BOOK_REPEATS: &str = "~19T*2BtpgW";

#[test]
fn alphabet_needs_no_quoting() {
    let mut seen = BTreeSet::new();
    for &character in text::ALPHABET {
        assert!(character.is_ascii_graphic() && !b"\"'\\".contains(&character));
        assert!(seen.insert(character));
    }
    for bytes in 0..200 {
        let mut out = String::new();
        text::encode(vec![0xFF; bytes].iter(), &mut out);
        assert_eq!(out.len(), text::len(bytes));
        assert_eq!(text::decode(out.as_bytes()), Ok(vec![0xFF; bytes]));
    }
    for characters in 0..2_000 {
        let bytes = text::capacity(characters);
        assert!(text::len(bytes) <= characters && text::len(bytes + 1) > characters);
    }
}

fn malformed(kind_and_body: impl FnOnce(&mut bits::BitWriter<'_>)) -> Result<DoneMap, Ignored> {
    let mut body = Vec::new();
    let mut writer = bits::BitWriter::new(&mut body);
    kind_and_body(&mut writer);
    writer.finish();
    DoneMap::decode(77, &with_check(77, &body))
}

fn with_check(committed: i64, body: &[u8]) -> String {
    let mut checked = b"~1".to_vec();
    checked.extend(committed.to_be_bytes());
    checked.extend(body);
    let mut payload = body.to_vec();
    payload.extend(crc32fast::hash(&checked).to_le_bytes());
    let mut text = "~1".to_owned();
    text::encode(payload.iter(), &mut text);
    text
}

#[test]
fn content_that_cannot_be_is_ignored_though_its_check_is_right() {
    assert_eq!(
        malformed(|bits| bits.bits(3, 2)),
        Err(Ignored::Malformed { what: "the kind is unknown" })
    );
    // A repeat of 2⁶³: it must not be unrolled.
    assert_eq!(
        malformed(|bits| {
            bits.bits(1, 2);
            bits.bits(0, 12);
            bits.rice(0, 0);
            bits.rice(0, 0);
            bits.rice(u64::MAX, 0);
        }),
        Err(Ignored::TooManyRanges { limit: MAX_RANGES })
    );
    let above = Err(Ignored::Malformed { what: "an offset is above the highest possible" });
    for (gap, run) in [(u64::MAX, 0), (0, u64::MAX), (i64::MAX as u64 - 78, 0)] {
        let found = malformed(|bits| {
            bits.bits(0, 10);
            bits.rice(gap, 0);
            bits.rice(run, 0);
        });
        assert_eq!(found, above);
    }
    let ended = Err(Ignored::Malformed { what: "the bits end inside of a value" });
    assert_eq!(malformed(|bits| bits.bits(0, 11)), ended);
    assert_eq!(malformed(|_| {}), ended);
}

#[test]
fn more_ranges_than_are_read_are_cut() {
    let map = map_of(0, std::iter::repeat_n((1, 1), MAX_RANGES + 10));
    let mut encoder = Encoder::new();
    let (text, cut) = encoder.encode_within(&map, usize::MAX);
    assert_eq!((cut.kept_ranges, cut.cut_ranges, cut.cut_offsets), (MAX_RANGES, 10, 10));
    assert_eq!(cut.from, Some(map.ranges()[MAX_RANGES].start));
    assert_eq!(text.len(), map.encoded_len());
    assert_eq!(DoneMap::decode(0, text).unwrap().ranges(), &map.ranges()[..MAX_RANGES]);
}

/// The limit cuts on a whole range; what is kept is the beginning, and a higher limit keeps no less.
#[test]
fn limits_from_0_to_5000_keep_a_beginning() {
    let mut maps = windows();
    maps.push(("empty", DoneMap::new(5)));
    maps.push(("one", map_of(i64::MAX - 3, [(1, 1)])));
    let mut encoder = Encoder::new();
    for (name, map) in maps {
        let whole = map.encoded_len();
        let mut last = 0;
        for limit in 0..=5_000 {
            // Every limit where a try is cheap; the random patterns with thousands of ranges now and then.
            if map.ranges().len() > 1_100 && limit % 331 != 0 {
                continue;
            }
            let (text, cut) = encoder.encode_within(&map, limit);
            assert!(text.len() <= limit, "{name}: {} of {limit}", text.len());
            assert_eq!(cut.is_whole(), whole <= limit, "{name} at {limit}");
            assert!(cut.kept_ranges >= last, "{name} at {limit}");
            last = cut.kept_ranges;
            let kept = DoneMap::decode(map.committed(), text).unwrap();
            assert_eq!(kept.ranges(), &map.ranges()[..last], "{name} at {limit}");
            assert_eq!(kept.len() + cut.cut_offsets, map.len());
            assert_eq!(cut.from, map.ranges().get(last).map(|range| range.start));
        }
    }
}

#[test]
fn room_is_what_is_left() {
    let map = map_of(0, [(1, 9)]);
    let used = map.encoded_len();
    let room = map.room(used + 3);
    assert_eq!((room.bytes(), room.fits()), (3, true));
    assert!(!room.is_short(3) && room.is_short(4));
    let room = map.room(used - 1);
    assert_eq!((room.bytes(), room.fits(), room.is_short(1)), (0, false, true));
}

#[test]
fn a_span_that_fits_fits() {
    for limit in [0, 10, 64, 200, DEFAULT_LIMIT] {
        let span = span_that_fits(limit) as i64;
        // 21 and 32 are where a value of parameter 0 costs most for its offsets.
        for token in [(1, 1), (21, 21), (21, 1), (1, 21), (32, 32), (20, 2), (1, 3), (2, 1)] {
            let mut map = DoneMap::new(0);
            let endless = map_of(0, std::iter::repeat_n(token, 30_000));
            for range in endless.ranges().iter().filter(|range| range.end <= span) {
                map.push_range(range.clone()).unwrap();
            }
            assert!(map.room(limit).fits(), "{token:?} with {limit}");
        }
    }
    assert!(span_that_fits(DEFAULT_LIMIT) > 17_000);
}

#[test]
fn b47_over_the_limit() {
    let mut map = DoneMap::new(0);
    (1..100_000).step_by(2).for_each(|offset| map.push(offset).unwrap());
    assert!(map.room(DEFAULT_LIMIT).fits());
    assert_eq!(DoneMap::decode(0, &encode(&map)).unwrap(), map);

    // A pattern that does not fit, and texts of exactly 4,096 and 4,097 bytes.
    let map = windows().remove(5).1;
    let mut encoder = Encoder::new();
    assert!(!map.room(DEFAULT_LIMIT).fits());
    let mut part = DoneMap::new(0);
    let mut lengths = BTreeSet::new();
    for range in &map.ranges()[..14_000] {
        part.push_range(range.clone()).unwrap();
        if part.ranges().len() < 6_000 {
            continue;
        }
        let length = part.encoded_len();
        if length > 4_100 {
            break;
        }
        let (text, cut) = encoder.encode_within(&part, DEFAULT_LIMIT);
        assert_eq!(cut.is_whole(), length <= 4_096);
        assert!(text.len() <= 4_096);
        lengths.insert(length);
    }
    assert!(lengths.contains(&4_096) && lengths.contains(&4_097), "{:?}", lengths.last());
}

#[test]
fn b47_foreign_or_broken() {
    let mut map = DoneMap::new(500);
    map.push_range(510..900).unwrap();
    map.push(905).unwrap();
    let ours = encode(&map);
    assert_eq!(DoneMap::decode(500, ""), Ok(DoneMap::new(500)));
    // 100 bytes that look random, as far as they are text.
    let mut state = 1_u32;
    let bytes: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    })
    .take(100)
    .collect();
    assert_eq!(DoneMap::decode(500, &String::from_utf8_lossy(&bytes)), Err(Ignored::Foreign));
    assert_eq!(DoneMap::decode(500, "AQAA"), Err(Ignored::Foreign));
    assert_eq!(parallel_consumer::decode(500, "AQAA"), Err(Ignored::Foreign));
    assert_eq!(DoneMap::decode(500, &"x".repeat(4_096)), Err(Ignored::Foreign));
    assert!(DoneMap::decode(500, &("~1".to_owned() + &"x".repeat(4_094))).is_err());
    let unknown = ours.replacen('1', "2", 1);
    assert_eq!(DoneMap::decode(500, &unknown), Err(Ignored::UnknownVersion { version: Some('2') }));
    for end in 1..ours.len() {
        DoneMap::decode(500, &ours[..end]).expect_err("cut off");
    }
    let mut other = DoneMap::new(900);
    other.push_range(910..1_000).unwrap();
    assert_eq!(DoneMap::decode(500, &encode(&other)), Err(Ignored::CheckFailed { committed: 500 }));
    assert_eq!(DoneMap::decode(500, &ours), Ok(map));
    assert_eq!(
        DoneMap::decode(-1_001, &ours),
        Err(Ignored::NoCommittedOffset { committed: -1_001 })
    );
}

/// Every character of a text, replaced by every other one.
#[test]
fn damage_to_one_character_is_always_found() {
    let map = map_of(123_456_789, [(1, 5), (70, 3), (2, 2), (1, 1_000_000), (9, 1)]);
    let text = encode(&map);
    for at in 0..text.len() {
        for character in 0..128_u8 {
            let mut damaged = text.clone().into_bytes();
            if damaged[at] == character {
                continue;
            }
            damaged[at] = character;
            let damaged = String::from_utf8(damaged).unwrap();
            DoneMap::decode(123_456_789, &damaged).expect_err(&damaged);
        }
    }
    for base in (123_456_000..123_458_000).chain((0..62).map(|bit| 123_456_789 ^ (1 << bit))) {
        assert_eq!(DoneMap::decode(base, &text).is_ok(), base == 123_456_789);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn any_map_comes_back(map in any_map(400)) {
        let text = encode(&map);
        prop_assert_eq!(text.len(), map.encoded_len());
        prop_assert_eq!(DoneMap::decode(map.committed(), &text), Ok(map));
    }

    #[test]
    fn any_limit_keeps_a_beginning(map in any_map(400), limit in 0_usize..5_000, less in 0_usize..40) {
        let mut encoder = Encoder::new();
        let whole = map.encoded_len();
        for limit in [limit, whole.saturating_sub(less), whole + less] {
            let (text, cut) = encoder.encode_within(&map, limit);
            prop_assert!(text.len() <= limit);
            prop_assert_eq!(cut.is_whole(), whole <= limit);
            let kept = DoneMap::decode(map.committed(), text).unwrap();
            prop_assert_eq!(kept.ranges(), &map.ranges()[..cut.kept_ranges]);
            // One range more would not fit.
            if let Some(next) = map.ranges().get(cut.kept_ranges) {
                let mut more = kept;
                more.push_range(next.clone()).unwrap();
                prop_assert!(more.encoded_len() > limit);
            }
        }
    }

    #[test]
    fn contains_agrees_with_the_ranges(map in any_map(50), near in 0_usize..50, by in -2_i64..3) {
        if let Some(range) = map.ranges().get(near) {
            for edge in [range.start, range.end] {
                let offset = edge.saturating_add(by);
                let expected = map.ranges().iter().any(|range| range.contains(&offset));
                prop_assert_eq!(map.contains(offset), expected);
            }
        }
        prop_assert!(!map.contains(map.committed()));
    }

    /// Finishes any one offset: the text grows by no more than it is said to.
    #[test]
    fn one_more_record_adds_no_more_than_the_bound(
        map in any_map(200), pick in any::<prop::sample::Index>(), at in 0_u8..3, beyond in 1_i64..REASONABLE,
    ) {
        let gap = pick.index(map.ranges().len() + 1);
        let from = if gap == 0 { map.committed() + 1 } else { map.ranges()[gap - 1].end };
        let to = map.ranges().get(gap).map_or(from.saturating_add(beyond), |range| range.start);
        prop_assume!(from < to && to < i64::MAX);
        let offset = match at { 0 => from, 1 => to - 1, _ => from + (to - from) / 2 };
        let mut more = DoneMap::new(map.committed());
        for range in &map.ranges()[..gap] {
            more.push_range(range.clone()).unwrap();
        }
        more.push(offset).unwrap();
        for range in &map.ranges()[gap..] {
            more.push_range(range.clone()).unwrap();
        }
        prop_assert!(more.encoded_len() <= map.encoded_len() + MAX_GROWTH);
    }

    /// Damage that is not found by chance: 2⁻³² for each of these cases.
    #[test]
    fn damaged_texts_are_ignored(
        map in any_map(100), edits in vec((any::<prop::sample::Index>(), 0_u8..128, 0_u8..3), 1..6),
    ) {
        let text = encode(&map);
        prop_assume!(!text.is_empty());
        let mut damaged = text.clone().into_bytes();
        for (at, character, how) in edits {
            let at = at.index(damaged.len());
            match how {
                0 => damaged[at] = character,
                1 => damaged.insert(at, character),
                _ if damaged.len() > 1 => drop(damaged.remove(at)),
                _ => {}
            }
        }
        let damaged = String::from_utf8(damaged).unwrap();
        prop_assume!(damaged != text);
        prop_assert!(DoneMap::decode(map.committed(), &damaged).is_err());
    }

    #[test]
    fn any_text_is_read_without_panic(base in any::<i64>(), text in ".{0,300}", tail in "[!-~]{0,300}") {
        for text in [text.clone(), format!("~1{tail}"), format!("~{text}")] {
            prop_assert!(DoneMap::decode(base, &text).map_or(true, |map| map.is_empty()));
        }
    }

    /// Any bits with a right check: ranges are in order and bounded, and an accepted map is one that comes
    /// back. A text of 4,096 bytes stays within the bounds of memory and time.
    #[test]
    fn any_bits_stay_bounded(base in base(), body in vec(any::<u8>(), 0..3_300), kind in 0_u8..4) {
        let mut body = body;
        if let Some(first) = body.first_mut() {
            *first = *first & 0x3F | kind << 6;
        }
        if let Ok(map) = DoneMap::decode(base, &with_check(base, &body)) {
            prop_assert!(map.ranges().len() <= MAX_RANGES);
            let mut end = base;
            for range in map.ranges() {
                prop_assert!(range.start > end && range.end > range.start);
                end = range.end;
            }
            prop_assert_eq!(DoneMap::decode(base, &encode(&map)), Ok(map));
        }
    }
}
