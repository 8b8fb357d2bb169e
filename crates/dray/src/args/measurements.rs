//! The arguments of `dray survey` and `dray demo`.

use std::path::PathBuf;

use super::{examples, parse_count, parse_number};

/// Measure where the time goes.
///
/// Four cuts: the transport alone, the transport with a backend that does nothing, the
/// backend alone, the full path. Of a directory (needs root) the full path is that through a
/// mount of its own, of a target that without FUSE. The backend of a target or a mount is
/// measured where its server is on this machine, by root. Writes files of 32 MiB and removes them.
#[derive(Debug, clap::Args)]
#[command(after_help = examples::SURVEY)]
pub struct SurveyArgs {
    /// A directory, a mount point or a directory in a mount, or a target such as dray://HOST/NAME
    #[arg(value_name = "TARGET|DIR")]
    pub target: PathBuf,
    /// One JSON object a line for each measurement
    #[arg(long)]
    pub json: bool,
    /// Time of each measurement, seconds
    #[arg(long, value_name = "SECONDS", default_value = "0.3", value_parser = parse_number)]
    #[arg(allow_negative_numbers = true)]
    pub seconds: f64,
    /// Create, stat and unlink files instead of reading and writing one; in one directory, and in one of each thread
    #[arg(long, conflicts_with = "block")]
    pub metadata: bool,
    /// Threads, each waiting for its answer before it asks again [default: 1,4; for metadata 1,4,16,64]
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    #[arg(value_parser = parse_count, allow_negative_numbers = true)]
    pub threads: Vec<usize>,
    /// Block sizes, multiples of 4K up to 1M
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', default_values = ["4K", "64K", "1M"])]
    pub block: Vec<BlockSize>,
    /// For a target: none or psk:FILE [default: psk:/etc/dray/key if you can read that]
    #[arg(long, value_name = "none|psk:FILE")]
    pub auth: Option<String>,
}

/// Try it out: serve, mount, write, read back and compare.
///
/// All in a temporary directory, which is removed in the end. Needs root. Shows how fast it went.
#[derive(Debug, clap::Args)]
pub struct DemoArgs {
    /// Where the temporary directory is made [default: that of the system]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// How much is written
    #[arg(long, value_name = "MIB", default_value = "256", value_parser = parse_count)]
    #[arg(allow_negative_numbers = true)]
    pub mib: usize,
}

/// Bytes of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSize(pub usize);

impl std::str::FromStr for BlockSize {
    type Err = String;

    fn from_str(text: &str) -> Result<BlockSize, String> {
        let sound = |bytes: &u64| {
            *bytes > 0 && *bytes <= dray_core::IO_MAX_BYTES as u64 && bytes.is_multiple_of(4096)
        };
        let bytes = crate::mount::option_values::parse_size(text).ok().filter(sound);
        let bytes = bytes.ok_or_else(|| "a size is a multiple of 4K up to 1M".to_owned())?;
        Ok(BlockSize(bytes as usize))
    }
}
