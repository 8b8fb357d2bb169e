//! Divides the server's descriptors.
//!
//! Connections take most of them. Open files of clients and inodes used lately get by with fewer than
//! there are. So no client is refused for want of a descriptor that only makes another one faster.

/// For neither: the server's own, and those that a call needs for a moment.
const SPARE: usize = 64;
/// What an export keeps open of its own: its directory twice, /proc/self/fd, the table of mounts.
const OF_EXPORT: usize = 4;
/// Connections that there may be, as long as these are a small part of what the process may have.
const CONNECTIONS_MIN: usize = 32;
const CONNECTIONS_MIN_PART: usize = 8;
/// With fewer much is refused.
const ENOUGH: usize = 256;
/// For handshakes: of 1,024 at a time each has two descriptors, for a moment. Where there are
/// fewer than 4,096 connections there is one such handshake for four of them.
const HANDSHAKES_MAX: usize = 2048;
/// Descriptors of inodes used lately that are worth their memory.
const INODES_MAX: usize = 4096;

/// Parts of what the process may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptors {
    /// For connections that are served. Those in their handshake take further ones, at most a
    /// half of so many.
    pub connections: usize,
    /// For files open at clients, of each export.
    pub files_of_each: usize,
    /// For inodes used lately, of each export.
    pub inodes_of_each: usize,
}

/// Says so where there are too few (`RLIMIT_NOFILE`) to serve many.
pub fn warn_of_few(limit: usize) {
    if limit < ENOUGH {
        log::warn!(
            "{limit} descriptors are few: the server will refuse clients, and removals of open \
             files; raise the limit of the server to {ENOUGH} or more (LimitNOFILE, ulimit -n)"
        );
    }
}

impl Descriptors {
    /// Divides `limit` (`RLIMIT_NOFILE`) among connections and `exports`.
    pub fn divide(limit: usize, exports: usize) -> Descriptors {
        let exports = exports.max(1);
        let all = limit.saturating_sub(SPARE + OF_EXPORT * exports);
        let inodes = (all / 8).min(INODES_MAX * exports);
        let rest = all - inodes;
        let handshakes = (rest / 4).min(HANDSHAKES_MAX);
        let connections = ((rest - handshakes) * 2).div_euclid(3);
        let files = rest - handshakes - connections;
        Descriptors {
            connections: connections.max(CONNECTIONS_MIN.min(limit / CONNECTIONS_MIN_PART).max(1)),
            files_of_each: (files / exports).max(1),
            inodes_of_each: (inodes / exports).max(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_are_no_more_than_the_whole() {
        for (limit, exports) in [(1024, 1), (1024, 7), (20_000, 1), (20_000, 1000), (1 << 20, 3)] {
            let parts = Descriptors::divide(limit, exports);
            let handshakes = (parts.connections / 2).min(HANDSHAKES_MAX);
            let files = (parts.files_of_each + parts.inodes_of_each) * exports;
            let all = parts.connections + files + handshakes + SPARE + OF_EXPORT * exports;
            assert!(all <= limit, "{limit}: {parts:?}");
            assert!(all > limit * 8 / 10, "{limit}: {parts:?} are {all}");
        }
    }

    #[test]
    fn ten_thousand_connections_go_with_twenty_thousand_descriptors() {
        let parts = Descriptors::divide(20_000, 1);
        assert!(parts.connections >= 10_000, "{parts:?}");
        assert!(parts.files_of_each >= 4096 && parts.inodes_of_each >= 2048, "{parts:?}");
        assert_eq!(Descriptors::divide(256, 3).connections, 79);
        assert_eq!(Descriptors::divide(64, 3).connections, 8, "others need some, too");
    }
}
