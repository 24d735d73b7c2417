//! Goal: one prediction of one VM on one thread takes less than half of the time of LightGBM's
//! fastest C call for the same model, and less than a tenth of its Python's. The model has
//! LightGBM's default size, on as many features as a prediction; both must return equal results for
//! every row.

use std::{
    ffi::{CString, c_char, c_int, c_void},
    hint::black_box,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    ptr,
    time::Instant,
};

use benches::{
    failure::Failure,
    report::{Rounds, ratio, table},
};
use libloading::Library;
use prediction::{frigid::FEATURES, import::lightgbm::Model};

const ROUNDS: usize = 7;
/// Predictions of a round.
const TIMED: usize = 20_000;
/// Names the folder of a Python with LightGBM; `cargo xtask bench` makes one.
const LIGHTGBM: &str = "TARN_LIGHTGBM";
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/lightgbm/train.py");

fn main() -> ExitCode {
    match measure() {
        Ok(report) => {
            print!("{report}");
            ExitCode::SUCCESS
        }
        Err(failure) => {
            eprintln!("frigid_predict: {}", failure.story());
            ExitCode::FAILURE
        }
    }
}

fn measure() -> Result<String, Failure> {
    let python = Python(std::env::var_os(LIGHTGBM).map(PathBuf::from).ok_or(Failure::NoLightGbm)?);
    let folder = tempfile::tempdir().map_err(Failure::file("make", std::env::temp_dir()))?;
    python.run("make", folder.path())?;
    let (model, rows) = (folder.path().join("model.txt"), folder.path().join("rows.f64"));
    let text = std::fs::read_to_string(&model).map_err(Failure::file("read", &model))?;
    let bytes = std::fs::read(&rows).map_err(Failure::file("read", &rows))?;
    let numbers =
        bytes.chunks_exact(8).map(|number| f64::from_le_bytes(number.try_into().expect("eight bytes")));
    let numbers: Vec<f64> = numbers.collect();
    let rows: Vec<&[f64]> = numbers.chunks_exact(FEATURES).collect();
    let ours = Model::read(&text).map_err(|refused| Failure::Answer {
        what: "a model of LightGBM".to_owned(),
        answer: refused.to_string(),
    })?;
    let mut theirs = LightGbm::load(&python.library()?, &model)?;
    for row in &rows {
        let (our, their) = (ours.predict(row), theirs.predict(row));
        let is_alike = (our - their).abs() <= 1e-9 * their.abs().max(1.0);
        if !is_alike {
            let answer = format!("{our}, where LightGBM says {their}");
            return Err(Failure::Answer { what: "our forecast of a row".to_owned(), answer });
        }
    }
    let (mut our, mut their, mut script) = (Rounds::default(), Rounds::default(), Rounds::default());
    for _ in 0..ROUNDS {
        our.add(ns(&rows, |row| ours.predict(row)));
        their.add(ns(&rows, |row| theirs.predict(row)));
        script.add(python.run("time", folder.path())?.trim().parse().unwrap_or(f64::NAN));
    }
    let row = |name: &str, rounds: &Rounds| vec![name.to_owned(), rounds.show()];
    let rows = [row("ours", &our), row("LightGBM, C", &their), row("LightGBM, Python", &script)];
    let [c, py] = [their.median() / our.median(), script.median() / our.median()];
    let table = table(&["one forecast", "ns"], &rows);
    let [c, py] = [ratio("frigid_predict_vs_lightgbm_c", c), ratio("frigid_predict_vs_lightgbm_python", py)];
    Ok(format!("{table}{c}\n{py}\n"))
}

/// Nanoseconds that one prediction takes.
fn ns(rows: &[&[f64]], mut predict: impl FnMut(&[f64]) -> f64) -> f64 {
    let begun = Instant::now();
    for row in rows.iter().cycle().take(TIMED) {
        black_box(predict(black_box(row)));
    }
    begun.elapsed().as_nanos() as f64 / TIMED as f64
}

/// A Python that has LightGBM, in a folder of its own.
struct Python(PathBuf);

impl Python {
    fn run(&self, what: &str, folder: &Path) -> Result<String, Failure> {
        let program = self.0.join("bin/python");
        let mut command = Command::new(&program);
        command.arg(SCRIPT).arg(what).arg(folder).arg(FEATURES.to_string());
        let output = command.output().map_err(|source| Failure::Start { program, source })?;
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            false => Err(Failure::Ended { name: "train.py".to_owned(), status: output.status, log }),
        }
    }

    /// Where it keeps LightGBM itself.
    fn library(&self) -> Result<PathBuf, Failure> {
        let lib = self.0.join("lib");
        let versions = std::fs::read_dir(&lib).map_err(Failure::file("list", &lib))?;
        let library =
            |version: std::fs::DirEntry| version.path().join("site-packages/lightgbm/lib/lib_lightgbm.so");
        let mut found = versions.filter_map(Result::ok).map(library).filter(|library| library.is_file());
        found.next().ok_or(Failure::NoLightGbm)
    }
}

type Create = unsafe extern "C" fn(*const c_char, *mut c_int, *mut *mut c_void) -> c_int;
type Prepare = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    c_int,
    c_int,
    c_int,
    i32,
    *const c_char,
    *mut *mut c_void,
) -> c_int;
type Predict = unsafe extern "C" fn(*mut c_void, *const c_void, *mut i64, *mut f64) -> c_int;

/// LightGBM's own code with a model, ready to be asked of single rows. It lives as long as the benchmark.
struct LightGbm {
    predict: Predict,
    ready: *mut c_void,
}

/// LightGBM's number for rows of 64-bit numbers.
const F64: c_int = 1;

impl LightGbm {
    fn load(library: &Path, model: &Path) -> Result<Self, Failure> {
        let refused = |error: libloading::Error| Failure::Answer {
            what: library.display().to_string(),
            answer: error.to_string(),
        };
        let path =
            CString::new(model.as_os_str().as_bytes()).expect("a temporary folder has no NUL in its name");
        let (mut trees, mut booster, mut ready) = (0, ptr::null_mut(), ptr::null_mut());
        // SAFETY: LightGBM's library does nothing when it is loaded but set up itself.
        let library = Box::leak(Box::new(unsafe { Library::new(library) }.map_err(refused)?));
        // SAFETY: the types of all three are those of LightGBM's c_api.h.
        let create: Create = *unsafe { library.get(b"LGBM_BoosterCreateFromModelfile") }.map_err(refused)?;
        // SAFETY: as above.
        let prepare: Prepare =
            *unsafe { library.get(b"LGBM_BoosterPredictForMatSingleRowFastInit") }.map_err(refused)?;
        // SAFETY: as above.
        let predict: Predict =
            *unsafe { library.get(b"LGBM_BoosterPredictForMatSingleRowFast") }.map_err(refused)?;
        let features = i32::try_from(FEATURES).expect("a row has few numbers");
        // SAFETY: the path ends with NUL, and both numbers are there to be written.
        let created = unsafe { create(path.as_ptr(), &raw mut trees, &raw mut booster) };
        // SAFETY: the model was just made (0: it went well), the parameters end with NUL, and the number is there to be written.
        let prepared = unsafe {
            if created == 0 {
                prepare(booster, 0, 0, -1, F64, features, c"num_threads=1".as_ptr(), &raw mut ready)
            } else {
                created
            }
        };
        match prepared {
            0 => Ok(Self { predict, ready }),
            code => Err(Failure::Answer { what: "LightGBM".to_owned(), answer: format!("error {code}") }),
        }
    }

    fn predict(&mut self, row: &[f64]) -> f64 {
        assert_eq!(row.len(), FEATURES);
        let (mut length, mut answer) = (0, f64::NAN);
        // SAFETY: it was made ready for rows of this length, answers one number, and is not asked by two threads.
        let code =
            unsafe { (self.predict)(self.ready, row.as_ptr().cast(), &raw mut length, &raw mut answer) };
        assert!(code == 0 && length == 1, "LightGBM: error {code}, {length} answers");
        answer
    }
}
