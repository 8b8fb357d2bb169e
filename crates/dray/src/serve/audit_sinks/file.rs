//! JSON lines into a file that is replaced when it is large.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use dray_layers::audit::AuditRecord;

use super::Sink;
use crate::audit::render::Format;

pub struct FileSink {
    path: PathBuf,
    file: File,
    bytes: u64,
    max_bytes: u64,
    keep: u32,
    export: String,
}

impl FileSink {
    /// Goes on with the file. Errors: those of the file.
    pub fn open(path: &Path, max_bytes: u64, keep: u32, export: String) -> io::Result<FileSink> {
        let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path)?;
        let bytes = file.metadata()?.len();
        Ok(FileSink { path: path.to_owned(), file, bytes, max_bytes, keep, export })
    }

    fn numbered(&self, number: u32) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(format!(".{number}"));
        name.into()
    }

    /// Begins a new file; former ones have numbers.
    fn rotate(&mut self) -> io::Result<()> {
        let exists = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => Ok(()),
            _ => Err(error),
        };
        for number in (1..self.keep).rev() {
            fs::rename(self.numbered(number), self.numbered(number + 1)).or_else(exists)?;
        }
        match self.keep {
            0 => fs::remove_file(&self.path).or_else(exists)?,
            _ => fs::rename(&self.path, self.numbered(1)).or_else(exists)?,
        }
        let path = self.path.clone();
        *self = FileSink::open(&path, self.max_bytes, self.keep, std::mem::take(&mut self.export))?;
        Ok(())
    }
}

impl Sink for FileSink {
    fn send(&mut self, records: &[AuditRecord]) -> io::Result<()> {
        // Two exports, or logrotate(8), may share or move the file.
        let is_moved = !same_file(&self.path, &self.file);
        if is_moved {
            let export = std::mem::take(&mut self.export);
            *self = FileSink::open(&self.path.clone(), self.max_bytes, self.keep, export)?;
        }
        let mut lines = String::new();
        records
            .iter()
            .for_each(|one| Format::Json.line(one, Some(("export", &self.export)), &mut lines));
        if self.bytes > 0 && self.bytes + lines.len() as u64 > self.max_bytes {
            self.rotate()?;
        }
        self.file.write_all(lines.as_bytes())?;
        self.bytes += lines.len() as u64;
        self.file.sync_data()
    }
}

fn same_file(path: &Path, file: &File) -> bool {
    use std::os::unix::fs::MetadataExt;
    let (there, ours) = (fs::metadata(path), file.metadata());
    matches!((there, ours), (Ok(there), Ok(ours)) if there.ino() == ours.ino() && there.dev() == ours.dev())
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_layers::audit::AuditKind;

    // proves: P183
    #[test]
    fn a_large_file_is_replaced_and_former_ones_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.json");
        let mut sink = FileSink::open(&path, 400, 2, "a".into()).unwrap();
        for index in 1..=40 {
            let record = AuditRecord { index, ..AuditRecord::new(AuditKind::Start, index) };
            sink.send(&[record]).unwrap();
        }
        let text = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
        let (now, one, two) = (text("audit.json"), text("audit.json.1"), text("audit.json.2"));
        assert!(now.contains("\"index\":40") && !dir.path().join("audit.json.3").exists());
        let all = [two, one, now].concat();
        let indexes: Vec<u64> = all
            .lines()
            .map(|line| {
                serde_json::from_str::<serde_json::Value>(line).unwrap()["index"].as_u64().unwrap()
            })
            .collect();
        assert!(indexes.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{indexes:?}");
        // Somebody else has moved it.
        fs::rename(&path, dir.path().join("moved")).unwrap();
        sink.send(&[AuditRecord::new(AuditKind::Start, 1)]).unwrap();
        assert!(text("audit.json").contains("start"));
    }
}
