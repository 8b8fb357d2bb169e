//! Messages as brokers keep them: record batches of version 2 (Kafka protocol guide, "Record Batch"; KIP-98).

use super::protocol::Encoder;

/// Version of the layout.
const MAGIC: i8 = 2;
/// There is no producer id: nothing is exactly once, and nothing belongs to a transaction.
const NO_PRODUCER: i64 = -1;
/// Bytes of a message beside key and value, at most: lengths, times, and no headers.
const OVERHEAD_MAX_BYTES: usize = 32;

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub key: Vec<u8>,
    pub value: Vec<u8>,
    /// Since 1970.
    pub time_ms: i64,
    /// The number of the record, for people.
    pub index: u64,
}

impl Message {
    /// In a batch, at most.
    pub fn size_bytes(&self) -> usize {
        self.key.len() + self.value.len() + OVERHEAD_MAX_BYTES
    }
}

/// Which of the partitions messages with this key are in: that of the Java client's partitioner, so that others
/// find them (`org.apache.kafka.clients.producer.internals.BuiltInPartitioner`). `partitions` is not 0.
pub fn partition_of(key: &[u8], partitions: i32) -> i32 {
    (murmur2(key) & i32::MAX as u32) as i32 % partitions.max(1)
}

/// MurmurHash2 by Austin Appleby, with Kafka's seed (`org.apache.kafka.common.utils.Utils.murmur2`).
fn murmur2(data: &[u8]) -> u32 {
    const SEED: u32 = 0x9747_b28c;
    const M: u32 = 0x5bd1_e995;
    let mut hash = SEED ^ data.len() as u32;
    let (words, rest) = data.as_chunks::<4>();
    for word in words {
        let mut k = u32::from_le_bytes(*word).wrapping_mul(M);
        k ^= k >> 24;
        hash = hash.wrapping_mul(M) ^ k.wrapping_mul(M);
    }
    if !rest.is_empty() {
        let last = rest.iter().rev().fold(0, |last, byte| last << 8 | u32::from(*byte));
        hash = (hash ^ last).wrapping_mul(M);
    }
    hash ^= hash >> 13;
    hash = hash.wrapping_mul(M);
    hash ^ hash >> 15
}

/// CRC-32C, as iSCSI has it (RFC 3720, appendix B.4), by bytes.
pub fn crc32c(data: &[u8]) -> u32 {
    const TABLE: [u32; 256] = table();
    !data.iter().fold(!0, |crc, byte| TABLE[(crc as u8 ^ byte) as usize] ^ crc >> 8)
}

const fn table() -> [u32; 256] {
    const REVERSED: u32 = 0x82f6_3b78;
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (mut crc, mut bit) = (byte as u32, 0);
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ REVERSED } else { crc >> 1 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
}

/// The messages as one batch, which is not empty.
pub fn encode(messages: &[Message]) -> Vec<u8> {
    let first_ms = messages.first().map_or(0, |message| message.time_ms);
    let last_ms = messages.iter().map(|message| message.time_ms).max().unwrap_or(0);
    let mut body = Encoder::default();
    body.i16(0); // attributes: not compressed
    body.i32(messages.len() as i32 - 1);
    body.i64(first_ms);
    body.i64(last_ms);
    body.i64(NO_PRODUCER);
    body.i16(-1); // epoch of the producer
    body.i32(-1); // its first number
    body.i32(messages.len() as i32);
    for (offset, message) in messages.iter().enumerate() {
        let mut record = Encoder::default();
        record.i8(0); // attributes
        record.varint(message.time_ms.saturating_sub(first_ms));
        record.varint(offset as i64);
        record.varint_bytes(&message.key);
        record.varint_bytes(&message.value);
        record.varint(0); // headers
        body.varint_bytes(&record.0);
    }
    let mut batch = Encoder::default();
    batch.i64(0); // the broker gives the offset
    batch.i32((4 + 1 + 4 + body.0.len()) as i32);
    batch.i32(-1); // epoch of the leader
    batch.i8(MAGIC);
    batch.i32(crc32c(&body.0) as i32);
    batch.0.extend_from_slice(&body.0);
    batch.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values of Kafka's own test (`org.apache.kafka.common.utils.UtilsTest`).
    #[test]
    fn keys_are_hashed_as_the_java_client_does() {
        for (key, hash) in [
            ("21", -973_932_308),
            ("foobar", -790_332_482),
            ("a-little-bit-long-string", -985_981_536),
            ("a-little-bit-longer-string", -1_486_304_829),
            ("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58_897_971),
            ("abc", 479_470_107),
        ] {
            assert_eq!(murmur2(key.as_bytes()) as i32, hash, "{key}");
        }
        assert_eq!(partition_of(b"21", 7), (-973_932_308 & i32::MAX) % 7);
    }

    #[test]
    fn the_checksum_is_that_of_the_standard() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    }
}
