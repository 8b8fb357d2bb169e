//! Values of options, read from text: times, sizes and words.

use std::time::Duration;

use dray_fuse::{Consistency, TransportWish};

use crate::mount::options::LeaseChoice;
use crate::suggestions::meant;

/// Longest time that makes sense: about 68 years.
const SECONDS_MAX: f64 = (1u64 << 31) as f64;
/// Most of unsynced writes kept.
const REPLAY_MAX_BYTES: u64 = 64 << 30;
/// Below this a size has to say its unit.
const REPLAY_BARE_MIN_BYTES: u64 = dray_core::IO_MAX_BYTES as u64;
/// Seconds, with or without a fraction; 0 or `never`: no limit.
pub fn parse_timeout(text: &str) -> Result<Option<Duration>, String> {
    if text == "never" {
        return Ok(None);
    }
    let time = parse_seconds(text)?;
    Ok((!time.is_zero()).then_some(time))
}

pub fn parse_seconds(text: &str) -> Result<Duration, String> {
    let digits = text.strip_suffix('s').unwrap_or(text);
    let seconds = digits.parse::<f64>().ok().filter(|seconds| (0.0..SECONDS_MAX).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "a number of seconds is needed".to_owned())
}

pub fn parse_yes_no(text: &str) -> Result<bool, String> {
    match text {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err(format!("it is yes or no{}", meant(text, ["yes", "no"]))),
    }
}

pub fn lease_choice_name(leases: LeaseChoice) -> &'static str {
    match leases {
        LeaseChoice::Auto => "auto",
        LeaseChoice::Yes => "yes",
        LeaseChoice::No => "no",
    }
}

pub fn parse_lease_choice(text: &str) -> Result<LeaseChoice, String> {
    match text {
        "auto" => Ok(LeaseChoice::Auto),
        "yes" => Ok(LeaseChoice::Yes),
        "no" => Ok(LeaseChoice::No),
        _ => Err(format!("it is auto, yes or no{}", meant(text, ["auto", "yes", "no"]))),
    }
}

pub fn parse_consistency(text: &str) -> Result<Consistency, String> {
    match text {
        "strict" => Ok(Consistency::Strict),
        "close-to-open" => Ok(Consistency::CloseToOpen),
        "immutable" => Ok(Consistency::Immutable),
        _ => {
            let meant = meant(text, ["strict", "close-to-open", "immutable"]);
            Err(format!("it is strict, close-to-open or immutable{meant}"))
        }
    }
}

pub fn transport_name(transport: TransportWish) -> &'static str {
    match transport {
        TransportWish::Auto => "auto",
        TransportWish::Uring => "uring",
        TransportWish::Classic => "classic",
    }
}

pub fn parse_transport(text: &str) -> Result<TransportWish, String> {
    match text {
        "auto" => Ok(TransportWish::Auto),
        "uring" => Ok(TransportWish::Uring),
        "classic" => Ok(TransportWish::Classic),
        _ => {
            let meant = meant(text, ["auto", "uring", "classic"]);
            Err(format!("it is auto, uring or classic{meant}"))
        }
    }
}

/// How much is kept. A bare number is of bytes, and one that holds not even one large write is meant
/// otherwise.
pub fn parse_replay(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text)?;
    let bare = text.bytes().all(|byte| byte.is_ascii_digit());
    if bare && (1..REPLAY_BARE_MIN_BYTES).contains(&bytes) {
        return Err(format!(
            "without a unit it is {bytes} bytes; say {bytes}M, {bytes}K, or 0 for nothing"
        ));
    }
    Ok(bytes)
}

/// Bytes, with `K`, `M` or `G` for powers of 1024.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let wrong =
        || "a size such as 64M is needed (K, M or G for powers of 1024), at most 64G".to_owned();
    let upper = text.to_ascii_uppercase();
    let (digits, shift) = match upper.strip_suffix(['K', 'M', 'G']) {
        Some(digits) if upper.ends_with('K') => (digits, 10),
        Some(digits) if upper.ends_with('M') => (digits, 20),
        Some(digits) => (digits, 30),
        None => (upper.as_str(), 0),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    let bytes = number.checked_mul(1 << shift).filter(|bytes| *bytes <= REPLAY_MAX_BYTES);
    bytes.ok_or_else(wrong)
}
