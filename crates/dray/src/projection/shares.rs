//! Which share of a projection each server has, over a sample of inode numbers.

use dray_core::FileId;
use dray_layers::placement::{Definition, HOME, Placement, ServerIndex, Slices};
use serde_json::{Value, json};

/// The slices of a definition with failover, each with its servers and its part of the files, per cent.
pub struct SliceShares(Vec<(String, String, String, f64)>);

impl SliceShares {
    pub fn of(definition: &Definition) -> SliceShares {
        let slices = Slices::of(Placement::new(definition));
        let mut counts = vec![0_u64; slices.count()];
        for ino in 0..SAMPLE {
            counts[usize::from(slices.home(FileId { ino, generation: 0 }).0)] += 1;
        }
        let server = |ServerIndex(server)| definition.servers[usize::from(server)].clone();
        let share = |(slice, count)| {
            let next = slices.successor_of(slice).map(server).unwrap_or_default();
            let per_cent = count as f64 * 100.0 / SAMPLE as f64;
            (
                slices.export_of(slice, &definition.name),
                server(slices.home_of(slice)),
                next,
                per_cent,
            )
        };
        SliceShares(slices.all().zip(counts).map(share).collect())
    }

    pub fn json(&self) -> Value {
        let share = |(slice, home, next, files): &(String, String, String, f64)| json!({ "slice": slice, "home": home, "successor": next, "files_percent": files });
        self.0.iter().map(share).collect()
    }

    pub fn text(&self) -> String {
        let width = |part: fn(&(String, String, String, f64)) -> &String| {
            self.0.iter().map(|one| part(one).len()).max().unwrap_or(0)
        };
        let (slices, homes, nexts) =
            (width(|one| &one.0), width(|one| &one.1), width(|one| &one.2));
        let mut text =
            format!("  {:slices$}  {:homes$}  {:nexts$}  FILES\n", "SLICE", "HOME", "SUCCESSOR");
        for (slice, home, next, files) in &self.0 {
            text += &format!("  {slice:slices$}  {home:homes$}  {next:nexts$}  {files:4.1}%\n");
        }
        text
    }
}

/// Consecutive inode numbers that are looked at.
const SAMPLE: u64 = 100_000;

/// Per cent of files at home, and of directories, for each server. With servers that have their own disks all
/// names and attributes are at the first one, and what is spread are data.
pub struct HomeShares {
    servers: Vec<(String, f64, f64)>,
    own_disks: bool,
}

impl HomeShares {
    pub fn of(definition: &Definition) -> HomeShares {
        let placement = Placement::new(definition);
        let own_disks = !definition.layout.is_shared();
        let count = definition.servers.len() as u64;
        let mut counts = vec![(0_u64, 0_u64); definition.servers.len()];
        for ino in 0..SAMPLE {
            let id = FileId { ino, generation: 0 };
            let (ServerIndex(file), ServerIndex(dir)) = match own_disks {
                // Data are in all blocks of a large file. `modulo` goes by the number, too.
                true => (placement.block(id, ino / count), HOME),
                false => (placement.home(id), placement.directory(id)),
            };
            counts[usize::from(file)].0 += 1;
            counts[usize::from(dir)].1 += 1;
        }
        let per_cent = |count: u64| count as f64 * 100.0 / SAMPLE as f64;
        let share = |(server, (files, dirs)): (&String, (u64, u64))| {
            (server.clone(), per_cent(files), per_cent(dirs))
        };
        HomeShares {
            servers: definition.servers.iter().zip(counts).map(share).collect(),
            own_disks,
        }
    }

    pub fn json(&self) -> Value {
        let key = if self.own_disks { "data_percent" } else { "files_percent" };
        let share = |(server, files, dirs): &(String, f64, f64)| json!({ "server": server, key: files, "directories_percent": dirs });
        self.servers.iter().map(share).collect()
    }

    pub fn text(&self) -> String {
        let width = self.servers.iter().map(|(server, ..)| server.len()).max().unwrap_or(0);
        let files = if self.own_disks { " DATA" } else { "FILES" };
        let mut text = format!("  {:width$}  {files}  DIRECTORIES\n", "SERVER");
        for (server, files, dirs) in &self.servers {
            text += &format!("  {server:width$}  {files:4.1}%  {dirs:10.1}%\n");
        }
        text
    }
}
