"""Operations of the subject ``services``: the services container: started, stopped, queried, guarded."""
