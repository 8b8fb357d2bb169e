//! Consumers of a log: who they are, what they want, and how far they are. A file for each.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::filter::AuditFilter;
use super::kind::KindSet;

/// Most consumers of a log.
pub const CONSUMERS_MAX: usize = 256;
const NAME_MAX_BYTES: usize = 64;
const EXTENSION: &str = "toml";

/// A consumer, as its file has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Consumer {
    /// The name.
    pub name: String,
    /// The log of the bookmark, in hexadecimal digits; empty until it has read something.
    #[serde(default)]
    pub log: String,
    /// The number of the next record that it has not seen.
    pub bookmark: u64,
    /// Names of kinds; empty: all.
    #[serde(default)]
    pub kinds: Vec<String>,
    /// This user's records only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// This job's records only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// Records at this path or beneath it only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// When the bookmark moved last, microseconds since 1970.
    #[serde(default)]
    pub moved_us: u64,
    /// Without a move for so long it keeps no records, seconds; none: it always does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_max_s: Option<u64>,
    /// Why it does not get on, in words, where the server passes records on to it; empty: it does.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub trouble: String,
    /// Since when it does not, microseconds since 1970.
    #[serde(default)]
    pub trouble_us: u64,
}

impl Consumer {
    /// Whether a consumer may be called so. Errors: why not, in words.
    pub fn check_name(name: &str) -> Result<(), String> {
        let sound = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        let is_sound = !name.is_empty()
            && name.len() <= NAME_MAX_BYTES
            && !name.starts_with('.')
            && name.bytes().all(sound);
        match is_sound {
            true => Ok(()),
            false => Err(format!(
                "a consumer's name has letters, digits, `-`, `_` and `.`, {NAME_MAX_BYTES} at most, \
                 not `{name}`"
            )),
        }
    }

    /// What it wants. Errors: a kind that is not known.
    pub fn filter(&self) -> Result<AuditFilter, String> {
        let kinds = match self.kinds.is_empty() {
            true => None,
            false => {
                let names = self.kinds.iter().map(String::as_str);
                Some(KindSet::of_names(names).map_err(|unknown| unknown.to_string())?)
            }
        };
        let path = self.path.as_ref().map(|path| path.clone().into_bytes());
        let (uid, job) = (self.uid, self.job.clone());
        Ok(AuditFilter { kinds, uid, job, path, ..AuditFilter::default() })
    }

    /// Whether it has been idle for so long that it keeps no records.
    pub fn is_idle(&self, now_us: u64) -> bool {
        let idle_us = now_us.saturating_sub(self.moved_us);
        self.idle_max_s.is_some_and(|max| idle_us / 1_000_000 >= max)
    }
}

/// The consumers of the log in a directory.
#[derive(Clone, Debug)]
pub struct Consumers {
    dir: PathBuf,
}

impl Consumers {
    /// Of the log in `log_dir`.
    pub fn of(log_dir: &Path) -> Consumers {
        Consumers { dir: log_dir.join("consumers") }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.{EXTENSION}"))
    }

    /// All of them, by name. Errors: one cannot be read or makes no sense.
    pub fn all(&self) -> io::Result<Vec<Consumer>> {
        let entries = match fs::read_dir(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut all = Vec::new();
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == EXTENSION) {
                all.extend(read(&path)?);
            }
        }
        all.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(all)
    }

    /// The one of this name. Errors: as [`Consumers::all`].
    pub fn find(&self, name: &str) -> io::Result<Option<Consumer>> {
        if Consumer::check_name(name).is_err() {
            return Ok(None);
        }
        read(&self.path(name))
    }

    /// Keeps a consumer, durably. Errors: those of the files.
    pub fn save(&self, consumer: &Consumer) -> io::Result<()> {
        Consumer::check_name(&consumer.name).map_err(io::Error::other)?;
        fs::create_dir_all(&self.dir)?;
        let text = toml::to_string(consumer).map_err(io::Error::other)?;
        let (path, new) =
            (self.path(&consumer.name), self.dir.join(format!("{}.new", consumer.name)));
        let mut options = OpenOptions::new();
        options.create(true).truncate(true).write(true).mode(0o600);
        let mut file = options.open(&new)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, &path)?;
        File::open(&self.dir)?.sync_all()
    }

    /// Forgets a consumer. False: there was none.
    pub fn remove(&self, name: &str) -> io::Result<bool> {
        if Consumer::check_name(name).is_err() {
            return Ok(false);
        }
        match fs::remove_file(self.path(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            removed => removed.map(|()| true),
        }
    }
}

fn read(path: &Path) -> io::Result<Option<Consumer>> {
    let text = match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        text => text?,
    };
    toml::from_str::<Consumer>(&text).map(Some).map_err(|error| {
        let export = path.ancestors().nth(2).and_then(Path::file_name); // EXPORT/consumers/NAME.toml
        let text = |name: Option<&OsStr>| name.unwrap_or_default().to_string_lossy().into_owned();
        let (export, name) = (text(export), text(path.file_stem()));
        io::Error::other(format!(
            "{} makes no sense ({}): remove the consumer with `dray audit deregister {export} {name}`",
            path.display(),
            error.message()
        ))
    })
}
