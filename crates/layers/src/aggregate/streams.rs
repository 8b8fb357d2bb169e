//! Recognises streams among the reads of one file: reads one behind the other, and reads at equal
//! distances. Reads of all clients count, because one client may go on where another one ended.

/// Streams of one file that are followed. The one that was used least recently goes first.
const STREAMS_MAX: usize = 16;

/// Reads of one stream that are sent together arrive in any order, this far from each other.
const DISORDER_MAX_BYTES: u64 = 256 << 10;

/// Reads at larger distances are not expected to go on.
const STRIDE_MAX_BYTES: u64 = 1 << 30;

/// Reads at equal distances that are so near that everything between them is worth reading, too.
const DENSE_MAX_BYTES: u64 = 64 << 10;

/// What a read is a part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadPattern {
    /// Nothing that is known.
    None,
    /// A sequence: it goes on behind this read. `run` reads of it have been seen.
    Sequential { run: u32 },
    /// Reads of equal length at equal distances: the next one begins `stride_bytes` behind this one.
    Strided { stride_bytes: u64 },
}

/// An open file, as far as streams know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reader(pub(super) u64);

#[derive(Clone, Copy, Debug)]
struct Stream {
    reader: Reader,
    /// The last read.
    at: u64,
    len_bytes: u64,
    /// Behind the last byte that was read.
    end: u64,
    /// The distance of the last two reads; 0: not known.
    stride_bytes: u64,
    /// Reads in a row that followed the one before.
    run: u32,
    /// Reads in a row at the same distance.
    strides: u32,
    used: u64,
}

/// The streams of one file.
#[derive(Debug, Default)]
pub(super) struct Streams {
    list: Vec<Stream>,
    clock: u64,
}

impl Streams {
    /// Notes a read, and says what it is a part of.
    pub(super) fn note(&mut self, reader: Reader, at: u64, len_bytes: u64) -> ReadPattern {
        self.clock += 1;
        if let Some(stream) = self.list.iter_mut().find(|one| one.is_followed_by(at)) {
            return stream.follow(at, len_bytes, self.clock);
        }
        let clock = self.clock;
        let strides = |one: &&mut Stream| one.may_stride_to(reader, at, len_bytes);
        let known = self.list.iter_mut().filter(strides).max_by_key(|one| (one.strides, one.used));
        match known {
            Some(stream) => stream.stride_to(at, len_bytes, clock),
            None => {
                self.begin(reader, at, len_bytes);
                ReadPattern::None
            }
        }
    }

    fn begin(&mut self, reader: Reader, at: u64, len_bytes: u64) {
        if self.list.len() >= STREAMS_MAX
            && let Some(oldest) = (0..self.list.len()).min_by_key(|&index| self.list[index].used)
        {
            self.list.swap_remove(oldest);
        }
        let end = at.saturating_add(len_bytes);
        let used = self.clock;
        self.list.push(Stream {
            reader,
            at,
            len_bytes,
            end,
            stride_bytes: 0,
            run: 0,
            strides: 0,
            used,
        });
    }
}

impl Stream {
    /// A stream that is known may be followed by reads in disorder. A single read says little.
    fn is_followed_by(&self, at: u64) -> bool {
        match self.run {
            0 => at == self.end && self.strides == 0,
            _ => at.abs_diff(self.end) <= DISORDER_MAX_BYTES,
        }
    }

    fn follow(&mut self, at: u64, len_bytes: u64, clock: u64) -> ReadPattern {
        self.run = self.run.saturating_add(1);
        self.end = self.end.max(at.saturating_add(len_bytes));
        (self.at, self.len_bytes, self.used) = (at, len_bytes, clock);
        ReadPattern::Sequential { run: self.run }
    }

    /// Whether the read may be the next one of this reader at a distance.
    fn may_stride_to(&self, reader: Reader, at: u64, len_bytes: u64) -> bool {
        let distance = at.wrapping_sub(self.at);
        self.reader == reader
            && self.run == 0
            && self.len_bytes == len_bytes
            && at > self.at
            && distance <= STRIDE_MAX_BYTES
            && (self.strides < 2 || distance == self.stride_bytes)
    }

    fn stride_to(&mut self, at: u64, len_bytes: u64, clock: u64) -> ReadPattern {
        let distance = at - self.at;
        self.strides = if distance == self.stride_bytes { self.strides + 1 } else { 1 };
        self.stride_bytes = distance;
        self.end = at.saturating_add(len_bytes);
        (self.at, self.used) = (at, clock);
        match self.strides {
            0 | 1 => ReadPattern::None,
            run if distance <= DENSE_MAX_BYTES => ReadPattern::Sequential { run },
            _ => ReadPattern::Strided { stride_bytes: distance },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Reader = Reader(1);
    const TWO: Reader = Reader(2);
    const NONE: ReadPattern = ReadPattern::None;

    fn sequential(run: u32) -> ReadPattern {
        ReadPattern::Sequential { run }
    }

    #[test]
    fn reads_behind_each_other_are_a_stream_from_the_second_on() {
        let mut streams = Streams::default();
        assert_eq!(streams.note(ONE, 0, 4096), NONE);
        assert_eq!(streams.note(ONE, 4096, 4096), sequential(1));
        assert_eq!(streams.note(ONE, 8192, 100), sequential(2));
        assert_eq!(streams.note(ONE, 8292, 4096), sequential(3));
    }

    #[test]
    fn random_reads_are_no_stream() {
        let mut streams = Streams::default();
        for at in [7_000_000, 4_000_000, 9_100_000, 100_000, 8_000_000, 2_000_000] {
            assert_eq!(streams.note(ONE, at, 4096), NONE);
        }
    }

    #[test]
    fn another_client_goes_on_where_the_first_one_ended() {
        let mut streams = Streams::default();
        streams.note(ONE, 0, 4096);
        assert_eq!(streams.note(TWO, 4096, 4096), sequential(1));
        assert_eq!(streams.note(ONE, 8192, 4096), sequential(2));
    }

    #[test]
    fn streams_of_many_clients_in_one_file_are_distinguished() {
        let mut streams = Streams::default();
        let start = |client: u64| client << 30;
        for step in 0..8u64 {
            for client in 0..STREAMS_MAX as u64 {
                let at = start(client) + step * 4096;
                let pattern = streams.note(Reader(client), at, 4096);
                let expected = if step == 0 { NONE } else { sequential(step as u32) };
                assert_eq!(pattern, expected, "client {client}, step {step}");
            }
        }
    }

    #[test]
    fn reads_that_arrive_in_disorder_are_one_stream() {
        let mut streams = Streams::default();
        streams.note(ONE, 0, 65_536);
        streams.note(ONE, 65_536, 65_536);
        for at in [3 * 65_536, 2 * 65_536, 5 * 65_536, 4 * 65_536] {
            assert!(
                matches!(streams.note(ONE, at, 65_536), ReadPattern::Sequential { .. }),
                "{at}"
            );
        }
    }

    #[test]
    fn equal_distances_are_a_stream_from_the_third_read_on() {
        let mut streams = Streams::default();
        let far = 4 << 20;
        assert_eq!(streams.note(ONE, 0, 4096), NONE);
        assert_eq!(streams.note(ONE, far, 4096), NONE);
        let strided = ReadPattern::Strided { stride_bytes: far };
        assert_eq!(streams.note(ONE, 2 * far, 4096), strided);
        assert_eq!(streams.note(ONE, 3 * far, 4096), strided);
        // The reads of somebody else in between change nothing.
        assert_eq!(streams.note(TWO, 3 * far + 50_000, 4096), NONE);
        assert_eq!(streams.note(ONE, 4 * far, 4096), strided);
    }

    #[test]
    fn small_distances_are_as_good_as_none() {
        let mut streams = Streams::default();
        streams.note(ONE, 0, 4096);
        streams.note(ONE, 16_384, 4096);
        assert!(matches!(streams.note(ONE, 32_768, 4096), ReadPattern::Sequential { .. }));
    }

    #[test]
    fn the_largest_offsets_are_no_trouble() {
        let mut streams = Streams::default();
        for at in [u64::MAX, u64::MAX - 1, 0, u64::MAX] {
            streams.note(ONE, at, 1 << 20);
        }
    }

    #[test]
    fn the_number_of_streams_is_bounded() {
        let mut streams = Streams::default();
        for number in (0..1000u64).rev() {
            streams.note(Reader(number), number << 32, 4096);
        }
        assert_eq!(streams.list.len(), STREAMS_MAX);
    }
}
