//! Decimal numbers as text into whole multiples of a power of ten, without the detour over `f64`: a time
//! of `5.8926549999999995` seconds is rounded once, to the picosecond.

/// Why a text is no whole multiple within 64 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DecimalError {
    NotANumber,
    Negative,
    TooLarge,
}

/// More digits than this cannot change a result of at most 20.
const DIGITS_KEPT: usize = 30;

/// `text * 10^shift`, rounded half up.
pub(crate) fn scaled(text: &str, shift: i32) -> Result<u64, DecimalError> {
    let (negative, unsigned) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let (number, exponent) = match unsigned.split_once(['e', 'E']) {
        Some((number, exponent)) => (number, parse_exponent(exponent)?),
        None => (unsigned, 0),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = || whole.bytes().chain(fraction.bytes());
    if digits().next().is_none() || !digits().all(|byte| byte.is_ascii_digit()) {
        return Err(DecimalError::NotANumber);
    }
    let significant = digits().skip_while(|byte| *byte == b'0');
    let mut mantissa = 0_u128;
    let mut kept = 0_usize;
    let mut total = 0_i64;
    for digit in significant {
        if kept < DIGITS_KEPT {
            mantissa = mantissa * 10 + u128::from(digit - b'0');
            kept += 1;
        }
        total += 1;
    }
    if mantissa == 0 {
        return Ok(0);
    }
    if negative {
        return Err(DecimalError::Negative);
    }
    let dropped = total - kept as i64;
    let power = i64::from(exponent) + i64::from(shift) - fraction.len() as i64 + dropped;
    shifted(mantissa, power)
}

fn shifted(mantissa: u128, power: i64) -> Result<u64, DecimalError> {
    let result = if power >= 0 {
        u32::try_from(power)
            .ok()
            .and_then(|power| mantissa.checked_mul(10_u128.checked_pow(power)?))
            .ok_or(DecimalError::TooLarge)?
    } else {
        match u32::try_from(-power)
            .ok()
            .and_then(|power| 10_u128.checked_pow(power))
        {
            Some(divisor) => (mantissa + divisor / 2) / divisor,
            None => 0,
        }
    };
    u64::try_from(result).map_err(|_| DecimalError::TooLarge)
}

fn parse_exponent(text: &str) -> Result<i32, DecimalError> {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(DecimalError::NotANumber);
    }
    // An exponent past 32 bits means zero or far too much; its sign decides which.
    let limit = 1_000_000_000;
    let size = digits.parse::<i32>().unwrap_or(limit).min(limit);
    Ok(if text.starts_with('-') { -size } else { size })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimals_round_once() {
        assert_eq!(scaled("5.8926549999999995", 12), Ok(5_892_655_000_000));
        assert_eq!(scaled("0.1", 12), Ok(100_000_000_000));
        assert_eq!(scaled("1e-05", 12), Ok(10_000_000));
        assert_eq!(scaled("1.5E+2", 0), Ok(150));
        assert_eq!(scaled("0.5", 0), Ok(1));
        assert_eq!(scaled("0.4999999999999999999999999999999999999999999", 0), Ok(0));
        assert_eq!(scaled(".5", 1), Ok(5));
        assert_eq!(scaled("5.", 1), Ok(50));
        assert_eq!(scaled("-0.0", 12), Ok(0));
        assert_eq!(scaled("00000000000000000000000000000000000000012", 0), Ok(12));
        assert_eq!(scaled("18446744073709551615", 0), Ok(u64::MAX));
        assert_eq!(scaled("1e-99999999999", 0), Ok(0));
    }

    #[test]
    fn what_is_no_such_number_is_refused() {
        for text in [
            "", ".", "-", "abc", "1.2.3", "1e", "1e+", "NaN", "inf", "0x10", "1 2", "--1", "1e-+5",
        ] {
            assert_eq!(scaled(text, 12), Err(DecimalError::NotANumber), "{text}");
        }
        assert_eq!(scaled("-1", 12), Err(DecimalError::Negative));
        for text in ["18446744073709551616", "1e99999999999", "1e30"] {
            assert_eq!(scaled(text, 0), Err(DecimalError::TooLarge), "{text}");
        }
        let long = "9".repeat(100_000);
        assert_eq!(scaled(&long, 0), Err(DecimalError::TooLarge));
    }
}
