//! Bits, and Rice codes with an escape.

/// So many ones in a row are the escape: the value follows as it is.
pub(super) const ESCAPE: u32 = 20;
/// Bits for the width of an escaped value.
const WIDTH_BITS: u32 = 6;
/// Parameters of the Rice codes are below this: they have four bits in the header.
pub(super) const PARAMETERS: usize = 16;

/// Bits that [`BitWriter::rice`] writes.
pub(super) fn rice_bits(value: u64, k: u32) -> u64 {
    let quotient = value >> k;
    if quotient < u64::from(ESCAPE) {
        quotient + 1 + u64::from(k)
    } else {
        u64::from(ESCAPE + WIDTH_BITS + width(value))
    }
}

fn width(value: u64) -> u32 {
    (u64::BITS - value.leading_zeros()).max(1)
}

/// Appends bits to bytes, the highest bit first.
#[derive(Debug)]
pub(super) struct BitWriter<'a> {
    out: &'a mut Vec<u8>,
    pending: u128,
    pending_bits: u32,
}

impl<'a> BitWriter<'a> {
    pub(super) fn new(out: &'a mut Vec<u8>) -> Self {
        BitWriter { out, pending: 0, pending_bits: 0 }
    }

    /// The lowest `bits` (at most 64) bits of `value`.
    pub(super) fn bits(&mut self, value: u64, bits: u32) {
        debug_assert!(bits == 64 || value >> bits == 0);
        self.pending = self.pending << bits | u128::from(value);
        self.pending_bits += bits;
        while self.pending_bits >= 8 {
            self.pending_bits -= 8;
            self.out.push((self.pending >> self.pending_bits) as u8);
        }
        self.pending &= (1 << self.pending_bits) - 1;
    }

    pub(super) fn rice(&mut self, value: u64, k: u32) {
        let quotient = value >> k;
        if quotient < u64::from(ESCAPE) {
            // As many ones as the quotient says, and a zero.
            self.bits((1 << (quotient + 1)) - 2, quotient as u32 + 1);
            self.bits(value & ((1 << k) - 1), k);
        } else {
            self.bits((1 << ESCAPE) - 1, ESCAPE);
            let width = width(value);
            self.bits(u64::from(width - 1), WIDTH_BITS);
            self.bits(value, width);
        }
    }

    /// Fills the last byte with ones.
    pub(super) fn finish(mut self) {
        let fill = (8 - self.pending_bits) % 8;
        self.bits((1 << fill) - 1, fill);
    }
}

/// Reads what [`BitWriter`] wrote; `None` where the bits end too early.
#[derive(Debug)]
pub(super) struct BitReader<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> BitReader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        BitReader { bytes, position: 0 }
    }

    fn bit(&mut self) -> Option<bool> {
        let byte = self.bytes.get(self.position / 8)?;
        let bit = byte >> (7 - self.position % 8) & 1 == 1;
        self.position += 1;
        Some(bit)
    }

    pub(super) fn bits(&mut self, bits: u32) -> Option<u64> {
        let mut value = 0;
        for _ in 0..bits {
            value = value << 1 | u64::from(self.bit()?);
        }
        Some(value)
    }

    pub(super) fn rice(&mut self, k: u32) -> Option<u64> {
        let mut quotient = 0;
        while self.bit()? {
            quotient += 1;
            if quotient == ESCAPE {
                let width = self.bits(WIDTH_BITS)? as u32 + 1;
                return self.bits(width);
            }
        }
        Some(u64::from(quotient) << k | self.bits(k)?)
    }

    /// Whether only the filling of the last byte is left. No code can be mistaken for it: a code that
    /// begins with up to seven ones needs a further bit.
    pub(super) fn at_end(&self) -> bool {
        let left = self.bytes.len() * 8 - self.position;
        left == 0
            || left < 8
                && self.bytes.last().is_some_and(|last| last.trailing_ones() as usize >= left)
    }
}
