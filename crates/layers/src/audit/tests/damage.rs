//! Damage in the last segment, which nothing follows yet.

use super::*;
use crate::audit::record::AuditGap;

const BATCH: u64 = 400;

/// Appends batches of 400 records. Each is so large that it can be read without the one before.
fn append(segment: &mut SegmentWriter, index: &mut u64, batches: u64) {
    for _ in 0..batches {
        let (mut bytes, first) = (Vec::new(), *index);
        for number in first..first + BATCH {
            let (record, [parent, to]) = sample(number);
            segment.next_codec().put(&record, (parent.as_ref(), to.as_ref()), &mut bytes);
        }
        *index += BATCH;
        segment.append((BATCH as u32, first, *index), &bytes).unwrap();
    }
}

/// One segment, which may be written on.
fn begun(dir: &Path) -> SegmentWriter {
    let (before, export) = ([0; HASH_BYTES], "home".to_owned());
    let header = SegmentHeader { log: 7, first_index: 1, made_us: 0, before, export };
    SegmentWriter::create(dir, &header).unwrap()
}

fn flip(path: &Path, at: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut bytes = [0; 2];
    file.read_exact_at(&mut bytes, at).unwrap();
    file.write_all_at(&bytes.map(|byte| !byte), at).unwrap();
}

fn last_path(dir: &Path) -> PathBuf {
    segments(&[dir.to_owned()]).unwrap().pop().unwrap().path
}

/// Where each batch of a segment ends, bytes.
fn ends(path: &Path) -> Vec<u64> {
    let (mut reader, mut ends) = (SegmentReader::open(path).unwrap(), Vec::new());
    while let ReadStep::Batch(_) = reader.step().unwrap() {
        ends.push(reader.at_bytes());
    }
    ends
}

fn read_on(reader: &mut LogReader) -> Vec<AuditRecord> {
    let mut all = Vec::new();
    while reader.advance(&mut |record| all.push(record)).unwrap() {}
    all
}

fn gaps(all: &[AuditRecord]) -> Vec<&AuditGap> {
    all.iter().filter_map(|one| one.gap.as_ref()).collect()
}

fn indexes(all: &[AuditRecord]) -> Vec<u64> {
    all.iter().filter(|one| one.gap.is_none()).map(|one| one.index).collect()
}

// proves: P367
#[test]
fn damage_in_the_last_segment_hides_nothing_before_or_behind_it() {
    let dir = tempfile::tempdir().unwrap();
    let (mut segment, mut index) = (begun(dir.path()), 1);
    append(&mut segment, &mut index, 4);
    let path = last_path(dir.path());
    let ends = ends(&path);
    flip(&path, (ends[0] + ends[1]) / 2);
    let mut reader = LogReader::new(vec![dir.path().to_owned()], 1);
    let all = read_on(&mut reader);
    assert_eq!(indexes(&all), (1..=BATCH).chain(2 * BATCH + 1..=4 * BATCH).collect::<Vec<_>>());
    let said = gaps(&all);
    assert_eq!((said.len(), said[0].records), (1, BATCH), "{said:?}");
    assert!(said[0].why.contains("is broken at byte"), "{said:?}");
    assert_eq!(reader.log(), Some(7));
    // At the end of what there is: said once, and read on behind it.
    flip(&path, (ends[2] + ends[3]) / 2);
    let mut reader = LogReader::new(vec![dir.path().to_owned()], 2 * BATCH + 1);
    let all = read_on(&mut reader);
    assert_eq!(indexes(&all), (2 * BATCH + 1..=3 * BATCH).collect::<Vec<_>>());
    assert_eq!(gaps(&all)[0].records, BATCH);
    assert!(read_on(&mut reader).is_empty());
    append(&mut segment, &mut index, 1);
    assert_eq!(indexes(&read_on(&mut reader)), (4 * BATCH + 1..=5 * BATCH).collect::<Vec<_>>());
}

// proves: P367
#[test]
fn a_start_cuts_off_no_whole_batch_and_verify_finds_the_damage_after_it() {
    let dir = tempfile::tempdir().unwrap();
    made(dir.path()); // the second batch of a segment cannot be read without the first
    let path = last_path(dir.path());
    let middle = ends(&path)[0];
    let whole = fs::read(&path).unwrap();
    let start = || assert!(Audit::open(options(dir.path()), no_paths()).unwrap().finish(ENOUGH));
    let found = |words: &str| {
        let found = problems(dir.path());
        assert!(found.len() == 1 && found[0].contains(words), "{found:?}");
    };
    flip(&path, middle - 40);
    let broken = fs::read(&path).unwrap();
    let all = all_of(&[dir.path()]);
    assert_eq!((indexes(&all), gaps(&all)[0].records), ((1..=40).collect(), 20));
    start();
    assert!(fs::read(&path).unwrap() == broken && !path.with_extension("torn").exists());
    let all = all_of(&[dir.path()]);
    assert_eq!((indexes(&all), gaps(&all)[0].records), ((1..=40).chain([61]).collect(), 20));
    found("has been changed");
    // A header: the rest can be read without it.
    fs::write(&path, &whole).unwrap();
    fs::remove_file(last_path(dir.path())).unwrap();
    flip(&path, 50);
    assert_eq!(indexes(&all_of(&[dir.path()])), (1..=60).collect::<Vec<_>>());
    start();
    assert_eq!(indexes(&all_of(&[dir.path()])), (1..=61).collect::<Vec<_>>());
    found("header");
    // The last batch could be a torn write. It is cut off, and found there.
    fs::remove_file(last_path(dir.path())).unwrap();
    fs::write(&path, &whole).unwrap();
    flip(&path, whole.len() as u64 - 50);
    assert_eq!(gaps(&all_of(&[dir.path()]))[0].records, 10);
    start();
    assert_eq!(indexes(&all_of(&[dir.path()])), (1..=51).collect::<Vec<_>>());
    found(".torn: its first batch is complete");
    // So is what earlier servers have cut off behind it.
    fs::write(path.with_extension("torn"), &whole[middle as usize - 50..]).unwrap();
    found(".torn: 10 whole records");
}
