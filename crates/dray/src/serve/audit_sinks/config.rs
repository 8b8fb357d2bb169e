//! `[audit.sink.NAME]` of the configuration.

use std::io;
use std::path::PathBuf;

use dray_layers::audit::{Consumer, KindSet};
use serde::Deserialize;

use super::file::FileSink;
use super::kafka::{KafkaAddress, KafkaSink};
use super::otlp::OtlpSink;
use super::syslog::{SyslogAddress, SyslogSink};
use super::{Sink, http};
use crate::mount::option_values::parse_size;
use crate::suggestions::meant;

/// Files that are kept of a sink into a file, by default and at most.
const FILES_KEPT: u32 = 5;
const FILES_KEPT_MAX: u32 = 1000;
/// Size of a file, by default.
const FILE_MAX_BYTES: u64 = 100 << 20;

/// The keys of the table.
pub const SINK_KEYS: [&str; 8] =
    ["type", "exports", "kinds", "path", "max", "keep", "address", "url"];

/// As written.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct SinkTable {
    r#type: Option<String>,
    exports: Vec<String>,
    kinds: Vec<String>,
    path: Option<PathBuf>,
    max: Option<String>,
    keep: Option<u32>,
    address: Option<String>,
    url: Option<String>,
}

/// A sink as it was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SinkPlan {
    pub name: String,
    /// Empty: all that have an audit.
    exports: Vec<String>,
    pub kinds: Vec<String>,
    to: SinkKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum SinkKind {
    File { path: PathBuf, max_bytes: u64, keep: u32 },
    Syslog(SyslogAddress),
    Otlp(http::Url),
    Kafka(KafkaAddress),
}

impl SinkTable {
    /// What it means. Errors: what is wrong with it, in words.
    pub fn plan(&self, name: &str) -> Result<SinkPlan, String> {
        Consumer::check_name(name)?;
        KindSet::of_names(self.kinds.iter().map(String::as_str))
            .map_err(|what| what.to_string())?;
        let to = match self.r#type.as_deref() {
            Some("file") => self.file()?,
            Some("syslog") => {
                let address = self.address.as_deref().ok_or("a sink to syslog needs an address")?;
                SinkKind::Syslog(address.parse()?)
            }
            Some("otlp") => {
                let url = self.url.as_deref().ok_or("a sink by OTLP needs a url")?;
                SinkKind::Otlp(url.parse()?)
            }
            Some("kafka") => {
                let address = self.address.as_deref().ok_or(
                    "a sink to Kafka needs an address, such as kafka://broker:9092/dray-audit",
                )?;
                SinkKind::Kafka(address.parse()?)
            }
            Some(other) => {
                let meant = meant(other, ["file", "syslog", "otlp", "kafka"]);
                return Err(format!("a sink is file, syslog, otlp or kafka, not `{other}`{meant}"));
            }
            None => return Err("it has no type: file, syslog, otlp or kafka".to_owned()),
        };
        let (exports, kinds) = (self.exports.clone(), self.kinds.clone());
        Ok(SinkPlan { name: name.to_owned(), exports, kinds, to })
    }

    fn file(&self) -> Result<SinkKind, String> {
        let path = self.path.clone().filter(|path| path.is_absolute());
        let path = path.ok_or("a sink into a file needs an absolute path")?;
        let max_bytes = self.max.as_deref().map_or(Ok(FILE_MAX_BYTES), parse_size)?;
        let keep = self.keep.unwrap_or(FILES_KEPT);
        if max_bytes < 4096 || keep > FILES_KEPT_MAX {
            return Err(format!("a file has 4K at least, and {FILES_KEPT_MAX} are kept at most"));
        }
        Ok(SinkKind::File { path, max_bytes, keep })
    }
}

impl SinkPlan {
    /// Whether it gets records of this export.
    pub fn wants(&self, export: &str) -> bool {
        self.exports.is_empty() || self.exports.iter().any(|one| one == export)
    }

    /// Reaches the other end. Errors: it is away.
    pub(super) fn connect(&self, export: &str) -> io::Result<Box<dyn Sink>> {
        let export = export.to_owned();
        Ok(match &self.to {
            SinkKind::File { path, max_bytes, keep } => {
                let opened = FileSink::open(path, *max_bytes, *keep, export);
                let named = |error: io::Error| {
                    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
                };
                Box::new(opened.map_err(named)?)
            }
            SinkKind::Syslog(address) => Box::new(SyslogSink::connect(address, export)?),
            SinkKind::Otlp(url) => Box::new(OtlpSink::new(url.clone(), export)),
            SinkKind::Kafka(address) => Box::new(KafkaSink::connect(address, export)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sinks_are_read_and_what_is_wrong_is_said() {
        let plan = |text: &str| toml::from_str::<SinkTable>(text).unwrap().plan("siem");
        plan("type = 'file'\npath = '/var/log/audit.json'\nmax = '1M'\nkeep = 3").unwrap();
        plan("type = 'syslog'\naddress = 'udp://10.0.0.1:514'\nkinds = ['change']").unwrap();
        plan("type = 'syslog'\naddress = 'unix:///dev/log'").unwrap();
        plan("type = 'kafka'\naddress = 'kafka://a:9092,b:9092/audit'").unwrap();
        let one = plan("type = 'otlp'\nurl = 'http://c:4318/v1/logs'\nexports = ['a']").unwrap();
        assert!(one.wants("a") && !one.wants("b"));
        for (text, words) in [
            ("", "no type"),
            ("type = 'fiel'", "did you mean `file`?"),
            ("type = 'file'\npath = 'x'", "absolute path"),
            ("type = 'syslog'", "needs an address"),
            ("type = 'syslog'\naddress = 'x'", "udp://HOST:PORT"),
            ("type = 'kafka'", "needs an address"),
            ("type = 'kafka'\naddress = 'a:9092'", "kafka://HOST:PORT"),
            ("type = 'otlp'\nurl = 'https://c/v1/logs'", "http://"),
            ("type = 'file'\npath = '/x'\nkinds = ['x']", "there are: all"),
        ] {
            let error = plan(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
        assert!(SinkTable::default().plan("a/b").unwrap_err().contains("letters"));
    }
}
